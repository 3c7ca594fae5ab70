"""Update rules, written once, and where they run."""
