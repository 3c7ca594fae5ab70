"""Datasets for causal language models: read files, tokenise, mask, pack, collate.

Data flows files -> records -> chat/tokenise -> tokens -> packing -> rows -> collate; `build` joins them.
"""
