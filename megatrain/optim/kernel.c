/* The update on the CPU: what optim/definition.py says, in one pass over memory.

   Rule: the same bits as that file. Each operation is rounded once, so this file is compiled with -ffp-contract=off and
   never with -ffast-math or anything that it implies. (-fno-math-errno only lets sqrtf be one instruction, which rounds
   correctly.)

   A chunk of 512 parameters goes through stages whose buffers stay in the first cache: master and gradient to fp32,
   moments decoded, the rule, moments encoded, the master stored. So formats and rules do not multiply: each is one short
   loop that the compiler makes vectors of, and `update_NAME` holds all of them once for each instruction set. Moments in
   fp32 are worked on where they lie. The whole is bound by memory: 26 bytes a parameter for AdamW on a split master with
   bf16 gradients and fp32 moments, 28 for fp32 throughout. Software prefetch did not help.

   One call updates a whole list of ranges on its own threads, which know nothing of Python: a caller that has released
   the interpreter's lock does not take it again before all is done. No result depends on the number of threads. They
   are started and joined in the call (tens of microseconds each, where a call takes milliseconds), so nothing is left
   that a fork could break, and calls may run at the same time.

   What it gives up: NaNs stay NaNs, with any sign and payload (a bf16 or split master has one NaN only). */

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(FLT_EVAL_METHOD == 0, "fp32 arithmetic must round each operation to fp32");

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* NO_OVERLAP: the arrays of a call do not overlap, which the loop below may rely on.
   AVX512: the instruction set, and the wish for vectors of full width (some tunings prefer half). */
#if defined(__clang__)
#define NO_OVERLAP _Pragma("clang loop vectorize(assume_safety)")
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
#define NO_OVERLAP _Pragma("GCC ivdep")
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif

enum {
    block = 128,     /* store/codecs.py: numbers with one scale */
    chunk = 512,     /* parameters between two stages: 2 KiB a buffer */
    lanes = 16,      /* partial sums of a measure */
    piece = 1 << 16, /* parameters that a thread takes at a time, and between two sums of a range's measure */
    max_states = 2,
    max_scalars = 9
};

/* Orders of optim/kernel.py. */
enum master { master_fp32, master_split, master_bf16 };
enum format { format_fp32, format_bf16, format_8bit, format_4bit };
enum rule { rule_adamw, rule_adam, rule_momentum, rule_sgd, rule_lion };

/* One moment: floats, bf16, or codes in whole blocks with a scale each. */
struct state {
    void *codes;
    float *scales;
    int32_t format;
    int32_t is_signed;
};

/* n parameters with the same scalars, the first of them number `first` of its own. weights: float, bf16, or with `low`
   the upper halves of a split master. grad: float or bf16. ema: NULL or floats. */
struct range {
    void *weights;
    int16_t *low;
    const void *grad;
    float *ema;
    struct state states[max_states];
    int64_t n;
    int64_t first;
    uint32_t key[2];
    int32_t rule;
    int32_t num_states;
    int32_t master;
    int32_t grad_is_bf16;
    int32_t is_rounded; /* anything stochastically */
    float ema_decay, ema_share;
    float scalars[max_scalars]; /* in the order of the rule's dataclass in optim/formula.py */
};

ALWAYS_INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

ALWAYS_INLINE float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

ALWAYS_INLINE float widen(uint16_t bf16) {
    return float_of((uint32_t)bf16 << 16);
}

ALWAYS_INLINE float join(uint16_t hi, int16_t lo) {
    return float_of(((uint32_t)hi << 16) + (uint32_t)(int32_t)lo);
}

/* The bits to split: every NaN becomes the one whose halves are 0x7FC0 and 0. */
ALWAYS_INLINE uint32_t bits_to_split(float x) {
    return x == x ? bits_of(x) : 0x7FC00000u;
}

/* store/rounding.py */

#define UNSIGNED_STREAM 0x9E3779B1u
#define MASTER_STREAM 0x85EBCA77u

ALWAYS_INLINE uint32_t random_bits(uint32_t index, uint32_t key0, uint32_t key1) {
    uint32_t x = index + key0;
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x ^= key1;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

ALWAYS_INLINE uint16_t round_to_bf16(float x, uint32_t random) {
    return x == x ? (uint16_t)((bits_of(x) + (random >> 16)) >> 16) : 0x7FC0u;
}

/* store/codecs.py. bits and mantissa are constants wherever these are inlined. */

/* Whole blocks of codes. Byte j of a block of 4-bit codes holds the codes j and j + 64. Codes lie in 32 bits meanwhile,
   as wide as the floats that they become: bytes among them would cost the vectors a shuffle at every step. */
ALWAYS_INLINE void unpack(const int bits, const uint8_t *restrict stored, uint32_t *restrict codes, int64_t n) {
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++)
            codes[i] = stored[i];
        return;
    }
    for (int64_t b = 0; b < n / block; b++) {
        for (int j = 0; j < block / 2; j++)
            codes[b * block + j] = stored[b * (block / 2) + j] & 15;
        for (int j = 0; j < block / 2; j++)
            codes[b * block + block / 2 + j] = stored[b * (block / 2) + j] >> 4;
    }
}

ALWAYS_INLINE void pack(const int bits, const uint32_t *restrict codes, uint8_t *restrict stored, int64_t n) {
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++)
            stored[i] = (uint8_t)codes[i];
        return;
    }
    for (int64_t b = 0; b < n / block; b++)
        for (int j = 0; j < block / 2; j++)
            stored[b * (block / 2) + j] = (uint8_t)(codes[b * block + j] | codes[b * block + block / 2 + j] << 4);
}

/* The level of the largest magnitude code, less 1: its place above the lowest level. */
ALWAYS_INLINE float signed_span(const int bits, const int mantissa) {
    const uint32_t code = (1u << (bits - 1)) - 1;
    return float_of(((127u << mantissa) + code) << (23 - mantissa)) - 1.0f;
}

/* half: half the exponents of the second moment, or NULL. */
ALWAYS_INLINE void decode_signed(const int bits, const int mantissa, const uint32_t *restrict codes,
                                 const float *restrict scales, const uint32_t *restrict half, float *restrict x,
                                 int64_t n) {
    const float share = (float)(1.0 / (double)signed_span(bits, mantissa));
    const uint32_t mask = (1u << (bits - 1)) - 1;
    for (int64_t b = 0; b < n / block; b++) {
        const float unit = scales[b] * share;
        for (int64_t i = b * block; i < (b + 1) * block; i++) {
            const uint32_t code = codes[i];
            const float level = float_of(((127u << mantissa) + (code & mask)) << (23 - mantissa));
            float value = (level - 1.0f) * unit;
            if (half)
                value *= float_of((127u + half[i]) << 23);
            x[i] = float_of(bits_of(value) ^ (code & (mask + 1)) << (32 - bits));
        }
    }
}

ALWAYS_INLINE void decode_unsigned(const int bits, const int mantissa, const uint32_t *restrict codes,
                                   const float *restrict scales, float *restrict x, int64_t n) {
    const uint32_t base = (127u << mantissa) - ((1u << bits) - 1);
    for (int64_t b = 0; b < n / block; b++) {
        const float scale = scales[b];
        for (int64_t i = b * block; i < (b + 1) * block; i++)
            x[i] = float_of((codes[i] + base) << (23 - mantissa)) * scale;
    }
}

/* The scale of a block whose largest magnitude has these bits, and its inverse; 0 for a block that gets no codes. */
ALWAYS_INLINE float block_scale(int32_t peak_bits, float *inverse) {
    const float peak = float_of((uint32_t)peak_bits);
    const int is_finite = peak_bits < 0x7F800000, is_used = is_finite && peak_bits >= 0x00800000;
    *inverse = is_used ? 1.0f / peak : 0.0f;
    return is_used ? peak : is_finite ? 0.0f : float_of(0x7FC00000u);
}

ALWAYS_INLINE uint32_t clamp_code(int32_t code, int32_t most) {
    code = code < 0 ? 0 : code;
    return (uint32_t)(code > most ? most : code);
}

ALWAYS_INLINE void encode_signed(const int bits, const int mantissa, const float *restrict x,
                                 const uint32_t *restrict half, const uint32_t *restrict random,
                                 uint32_t *restrict codes, float *restrict scales, int64_t n) {
    const float span = signed_span(bits, mantissa);
    const int32_t most = (1 << (bits - 1)) - 1;
    float scaled[block];
    for (int64_t b = 0; b < n / block; b++) {
        int32_t peak = 0;
        for (int j = 0; j < block; j++) {
            scaled[j] = x[b * block + j];
            if (half)
                scaled[j] *= float_of((127u - half[b * block + j]) << 23);
            const int32_t magnitude = (int32_t)(bits_of(scaled[j]) & 0x7FFFFFFFu);
            peak = magnitude > peak ? magnitude : peak;
        }
        float inverse;
        scales[b] = block_scale(peak, &inverse);
        const uint32_t is_used = inverse != 0.0f ? 0xFFFFFFFFu : 0u;
        for (int j = 0; j < block; j++) {
            const float y = float_of(bits_of(scaled[j]) & 0x7FFFFFFFu) * inverse * span + 1.0f;
            const uint32_t up = bits_of(y) + (random[b * block + j] >> (9 + mantissa));
            const int32_t code = (int32_t)(up >> (23 - mantissa)) - (127 << mantissa);
            const uint32_t sign = (bits_of(scaled[j]) >> 31) << (bits - 1);
            codes[b * block + j] = (clamp_code(code, most) | sign) & is_used;
        }
    }
}

ALWAYS_INLINE void encode_unsigned(const int bits, const int mantissa, const float *restrict x,
                                   const uint32_t *restrict random, uint32_t *restrict codes, float *restrict scales,
                                   int64_t n) {
    const int32_t base = (127 << mantissa) - ((1 << bits) - 1), most = (1 << bits) - 1;
    for (int64_t b = 0; b < n / block; b++) {
        int32_t peak = 0;
        for (int j = 0; j < block; j++) {
            const int32_t magnitude = (int32_t)(bits_of(x[b * block + j]) & 0x7FFFFFFFu);
            peak = magnitude > peak ? magnitude : peak;
        }
        float inverse;
        scales[b] = block_scale(peak, &inverse);
        const uint32_t is_used = inverse != 0.0f ? 0xFFFFFFFFu : 0u;
        for (int j = 0; j < block; j++) {
            const uint32_t r = random[b * block + j] * UNSIGNED_STREAM;
            const int32_t up = (int32_t)(bits_of(x[b * block + j] * inverse) + (r >> (9 + mantissa)));
            codes[b * block + j] = clamp_code((up >> (23 - mantissa)) - base, most) & is_used;
        }
    }
}

/* Stages. n parameters from `from` on; buffers have room for whole blocks. */

ALWAYS_INLINE int64_t whole_blocks(int64_t n) {
    return (n + block - 1) / block * block;
}

/* half: what first moments are coded relative to (out), from the codes of second moments. */
ALWAYS_INLINE void halve_exponents(const int mantissa, const uint32_t *restrict codes, uint32_t *restrict half,
                                   int64_t n) {
    for (int64_t i = 0; i < n; i++)
        half[i] = codes[i] >> (mantissa + 1);
}

#define CODES_AT(state, bits, from) ((uint8_t *)(state)->codes + (from) / block * (block * (bits) / 8))

/* A moment as floats: where it lies, or in x. A second moment in a block code also fills `half`. */
ALWAYS_INLINE float *load_state(const struct state *state, int64_t from, int64_t n, float *x, uint32_t *half,
                                int has_half) {
    if (state->format == format_fp32)
        return (float *)state->codes + from;
    if (state->format == format_bf16) {
        const uint16_t *restrict stored = (const uint16_t *)state->codes + from;
        for (int64_t i = 0; i < n; i++)
            x[i] = widen(stored[i]);
        return x;
    }
    uint32_t codes[chunk];
    const float *scales = state->scales + from / block;
    const int64_t whole = whole_blocks(n);
    if (state->format == format_8bit) {
        unpack(8, CODES_AT(state, 8, from), codes, whole);
        if (state->is_signed) {
            decode_signed(8, 4, codes, scales, has_half ? half : NULL, x, whole);
        } else {
            decode_unsigned(8, 3, codes, scales, x, whole);
            halve_exponents(3, codes, half, whole);
        }
    } else {
        unpack(4, CODES_AT(state, 4, from), codes, whole);
        if (state->is_signed) {
            decode_signed(4, 1, codes, scales, has_half ? half : NULL, x, whole);
        } else {
            decode_unsigned(4, 0, codes, scales, x, whole);
            halve_exponents(0, codes, half, whole);
        }
    }
    return x;
}

ALWAYS_INLINE void store_state(const struct state *state, int64_t from, int64_t n, float *x, uint32_t *half,
                               int has_half, const uint32_t *random) {
    if (state->format == format_fp32)
        return;
    if (state->format == format_bf16) {
        uint16_t *restrict stored = (uint16_t *)state->codes + from;
        const uint32_t factor = state->is_signed ? 1u : UNSIGNED_STREAM;
        for (int64_t i = 0; i < n; i++)
            stored[i] = round_to_bf16(x[i], random[i] * factor);
        return;
    }
    uint32_t codes[chunk];
    float *scales = state->scales + from / block;
    const int64_t whole = whole_blocks(n);
    for (int64_t i = n; i < whole; i++)
        x[i] = 0.0f;
    if (state->format == format_8bit) {
        if (state->is_signed) {
            encode_signed(8, 4, x, has_half ? half : NULL, random, codes, scales, whole);
        } else {
            encode_unsigned(8, 3, x, random, codes, scales, whole);
            halve_exponents(3, codes, half, whole);
        }
        pack(8, codes, CODES_AT(state, 8, from), whole);
    } else {
        if (state->is_signed) {
            encode_signed(4, 1, x, has_half ? half : NULL, random, codes, scales, whole);
        } else {
            encode_unsigned(4, 0, x, random, codes, scales, whole);
            halve_exponents(0, codes, half, whole);
        }
        pack(4, codes, CODES_AT(state, 4, from), whole);
    }
}

ALWAYS_INLINE void load_gradient(const struct range *r, int64_t from, int64_t n, float *restrict g) {
    const float *restrict g32 = (const float *)r->grad + from;
    const uint16_t *restrict g16 = (const uint16_t *)r->grad + from;
    if (r->grad_is_bf16)
        for (int64_t i = 0; i < n; i++)
            g[i] = widen(g16[i]);
    else
        for (int64_t i = 0; i < n; i++)
            g[i] = g32[i];
}

ALWAYS_INLINE void load_weights(const struct range *r, int64_t from, int64_t n, float *restrict w) {
    const float *restrict w32 = (const float *)r->weights + from;
    const uint16_t *restrict w16 = (const uint16_t *)r->weights + from;
    const int16_t *restrict lo = r->low + (r->low ? from : 0);
    if (r->master == master_fp32)
        for (int64_t i = 0; i < n; i++)
            w[i] = w32[i];
    else if (r->master == master_split)
        for (int64_t i = 0; i < n; i++)
            w[i] = join(w16[i], lo[i]);
    else
        for (int64_t i = 0; i < n; i++)
            w[i] = widen(w16[i]);
}

ALWAYS_INLINE void store_weights(const struct range *r, int64_t from, int64_t n, const float *restrict w,
                                 const uint32_t *restrict random) {
    float *restrict w32 = (float *)r->weights + from;
    uint16_t *restrict w16 = (uint16_t *)r->weights + from;
    int16_t *restrict lo = r->low + (r->low ? from : 0);
    if (r->master == master_fp32)
        for (int64_t i = 0; i < n; i++)
            w32[i] = w[i];
    else if (r->master == master_split)
        for (int64_t i = 0; i < n; i++) {
            const uint32_t bits = bits_to_split(w[i]);
            w16[i] = (uint16_t)((bits + 0x8000u) >> 16);
            lo[i] = (int16_t)bits;
        }
    else
        for (int64_t i = 0; i < n; i++)
            w16[i] = round_to_bf16(w[i], random[i] * MASTER_STREAM);
}

/* optim/formula.py. The names of the scalars are those of its dataclasses. */

ALWAYS_INLINE void adamw(const float *s, float *restrict w, const float *restrict g, float *restrict m,
                         float *restrict v, int64_t n) {
    const float clip = s[0], decay = s[1], beta1 = s[2], one_minus_beta1 = s[3], beta2 = s[4], one_minus_beta2 = s[5],
                eps = s[6], bias2_sqrt = s[7], step_size = s[8];
    NO_OVERLAP
    for (int64_t i = 0; i < n; i++) {
        const float clipped = g[i] * clip;
        m[i] = m[i] * beta1 + clipped * one_minus_beta1;
        v[i] = v[i] * beta2 + (clipped * clipped) * one_minus_beta2;
        w[i] = w[i] * decay - (m[i] / (sqrtf(v[i]) / bias2_sqrt + eps)) * step_size;
    }
}

ALWAYS_INLINE void adam(const float *s, float *restrict w, const float *restrict g, float *restrict m,
                        float *restrict v, int64_t n) {
    const float clip = s[0], weight_decay = s[1], beta1 = s[2], one_minus_beta1 = s[3], beta2 = s[4],
                one_minus_beta2 = s[5], eps = s[6], bias2_sqrt = s[7], step_size = s[8];
    NO_OVERLAP
    for (int64_t i = 0; i < n; i++) {
        const float clipped = g[i] * clip + w[i] * weight_decay;
        m[i] = m[i] * beta1 + clipped * one_minus_beta1;
        v[i] = v[i] * beta2 + (clipped * clipped) * one_minus_beta2;
        w[i] = w[i] - (m[i] / (sqrtf(v[i]) / bias2_sqrt + eps)) * step_size;
    }
}

ALWAYS_INLINE void momentum(const float *s, float *restrict w, const float *restrict g, float *restrict m, int64_t n) {
    const float clip = s[0], weight_decay = s[1], momentum = s[2], gradient_share = s[3], nesterov = s[4],
                look_ahead = s[5], lr = s[6];
    NO_OVERLAP
    for (int64_t i = 0; i < n; i++) {
        const float clipped = g[i] * clip + w[i] * weight_decay;
        m[i] = m[i] * momentum + clipped * gradient_share;
        w[i] = w[i] - (clipped * nesterov + m[i] * look_ahead) * lr;
    }
}

ALWAYS_INLINE void sgd(const float *s, float *restrict w, const float *restrict g, int64_t n) {
    const float clip = s[0], weight_decay = s[1], lr = s[2];
    NO_OVERLAP
    for (int64_t i = 0; i < n; i++)
        w[i] = w[i] - (g[i] * clip + w[i] * weight_decay) * lr;
}

ALWAYS_INLINE void lion(const float *s, float *restrict w, const float *restrict g, float *restrict m, int64_t n) {
    const float clip = s[0], decay = s[1], beta1 = s[2], one_minus_beta1 = s[3], beta2 = s[4], one_minus_beta2 = s[5],
                lr = s[6];
    NO_OVERLAP
    for (int64_t i = 0; i < n; i++) {
        const float clipped = g[i] * clip;
        const float direction = m[i] * beta1 + clipped * one_minus_beta1;
        const float sign = direction > 0.0f ? 1.0f : direction < 0.0f ? -1.0f : direction * 0.0f;
        w[i] = w[i] * decay - sign * lr;
        m[i] = m[i] * beta2 + clipped * one_minus_beta2;
    }
}

ALWAYS_INLINE void apply_rule(const struct range *r, float *w, const float *g, float *const *x, int64_t n) {
    switch (r->rule) {
    case rule_adamw:
        adamw(r->scalars, w, g, x[0], x[1], n);
        break;
    case rule_adam:
        adam(r->scalars, w, g, x[0], x[1], n);
        break;
    case rule_momentum:
        momentum(r->scalars, w, g, x[0], n);
        break;
    case rule_sgd:
        sgd(r->scalars, w, g, n);
        break;
    default:
        lion(r->scalars, w, g, x[0], n);
    }
}

ALWAYS_INLINE void update_ema(const struct range *r, int64_t from, int64_t n, const float *restrict w) {
    float *restrict average = r->ema + from;
    for (int64_t i = 0; i < n; i++)
        average[i] = average[i] * r->ema_decay + w[i] * r->ema_share;
}

/* Adds x[i]^2 to sums[i % lanes]: the order does not depend on the width of the vectors. n is a multiple of lanes. */
ALWAYS_INLINE void add_squares(double *restrict sums, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i += lanes)
        for (int lane = 0; lane < lanes; lane++)
            sums[lane] += (double)x[i + lane] * (double)x[i + lane];
}

/* sums: of squared changes, then of squared old weights. */
ALWAYS_INLINE void measure_chunk(const float *restrict w, float *restrict old, int64_t n, double (*sums)[lanes]) {
    float change[chunk];
    const int64_t whole = whole_blocks(n);
    for (int64_t i = 0; i < n; i++)
        change[i] = w[i] - old[i];
    for (int64_t i = n; i < whole; i++)
        change[i] = old[i] = 0.0f;
    add_squares(sums[0], change, whole);
    add_squares(sums[1], old, whole);
}

/* The update of parameters [from, from + n), from being a multiple of `piece`. measure: NULL, or two doubles to write:
   the sum of squared changes and that of squared old weights. */
ALWAYS_INLINE void update(const struct range *r, int64_t from, int64_t n, double *measure) {
    float w[chunk], g[chunk], old[chunk], buffers[max_states][chunk];
    uint32_t half[chunk];
    uint32_t random[chunk];
    double sums[2][lanes] = {{0}};
    /* A first moment is coded relative to a second one beside it, so that one is loaded and stored before. */
    const int has_half = r->num_states == 2;
    for (const int64_t end = from + n; from < end; from += chunk) {
        const int64_t size = end - from < chunk ? end - from : chunk;
        float *x[max_states];
        for (int i = r->num_states - 1; i >= 0; i--)
            x[i] = load_state(&r->states[i], from, size, buffers[i], half, has_half);
        load_weights(r, from, size, w);
        load_gradient(r, from, size, g);
        if (measure)
            memcpy(old, w, (size_t)size * sizeof *w);
        apply_rule(r, w, g, x, size);
        if (measure)
            measure_chunk(w, old, size, sums);
        if (r->ema)
            update_ema(r, from, size, w);
        if (r->is_rounded) {
            const uint32_t index = (uint32_t)(r->first + from);
            for (int64_t i = 0; i < whole_blocks(size); i++)
                random[i] = random_bits(index + (uint32_t)i, r->key[0], r->key[1]);
        }
        for (int i = r->num_states - 1; i >= 0; i--)
            store_state(&r->states[i], from, size, x[i], half, has_half, random);
        store_weights(r, from, size, w, random);
    }
    if (!measure)
        return;
    measure[0] = measure[1] = 0.0;
    for (int lane = 0; lane < lanes; lane++) {
        measure[0] += sums[0][lane];
        measure[1] += sums[1][lane];
    }
}

/* Updates parameters [from, from + n) of a range; measure: NULL, or two doubles to write. */
typedef void update_piece(const struct range *range, int64_t from, int64_t n, double *measure);

/* One call, as its threads see it. */
struct job {
    update_piece *update;
    const struct range *ranges;
    const int64_t *first_piece; /* of each range; one entry more: the number of all pieces */
    int64_t num_pieces;
    double *sums; /* two a piece, or NULL */
    atomic_int_fast64_t next;
};

/* Takes piece after piece until none is left. */
static void *work(void *pointer) {
    struct job *job = pointer;
    int64_t range = 0;
    for (;;) {
        const int64_t number = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (number >= job->num_pieces)
            return NULL;
        while (job->first_piece[range + 1] <= number) /* numbers only grow */
            range++;
        const int64_t from = (number - job->first_piece[range]) * piece;
        const int64_t left = job->ranges[range].n - from;
        job->update(&job->ranges[range], from, left < piece ? left : piece, job->sums ? job->sums + 2 * number : NULL);
    }
}

/* Works on this thread and on up to num_helpers more (as many as can be started); returns when all is done. */
static void work_together(struct job *job, pthread_t *helpers, int64_t num_helpers) {
    /* Signals are for the threads of the program; but a fault is reported by the thread that makes it. */
    sigset_t blocked, before;
    sigfillset(&blocked);
    sigdelset(&blocked, SIGSEGV);
    sigdelset(&blocked, SIGBUS);
    sigdelset(&blocked, SIGFPE);
    sigdelset(&blocked, SIGILL);
    pthread_sigmask(SIG_BLOCK, &blocked, &before);
    int64_t num_started = 0;
    while (num_started < num_helpers && pthread_create(&helpers[num_started], NULL, work, job) == 0)
        num_started++;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    work(job);
    for (int64_t i = 0; i < num_started; i++)
        pthread_join(helpers[i], NULL);
}

/* measures[2r], measures[2r + 1]: the sums of range r over its pieces, in order. */
static void add_pieces(const struct job *job, int64_t num_ranges, double *measures) {
    for (int64_t range = 0; range < num_ranges; range++) {
        double change = 0.0, old = 0.0;
        for (int64_t number = job->first_piece[range]; number < job->first_piece[range + 1]; number++) {
            change += job->sums[2 * number];
            old += job->sums[2 * number + 1];
        }
        measures[2 * range] = change;
        measures[2 * range + 1] = old;
    }
}

/* Updates all ranges on at most num_threads threads, this one among them. Small ranges start no threads of their own:
   there is one for each `piece` parameters of the list. measures: NULL, or two doubles a range to write.
   Returns 0, or -1 when there is no memory and nothing was updated. */
static int run(update_piece *update, const struct range *ranges, int64_t num_ranges, int64_t num_threads,
               double *measures) {
    int64_t num_params = 0, num_pieces = 0;
    for (int64_t range = 0; range < num_ranges; range++) {
        num_params += ranges[range].n;
        num_pieces += (ranges[range].n + piece - 1) / piece;
    }
    if (num_threads > (num_params + piece - 1) / piece)
        num_threads = (num_params + piece - 1) / piece;
    const int64_t num_helpers = num_threads > 1 ? num_threads - 1 : 0;

    /* One more than needed: for the end of the pieces, and because malloc(0) may return NULL. */
    int64_t *first_piece = malloc((size_t)(num_ranges + 1) * sizeof *first_piece);
    pthread_t *helpers = malloc((size_t)(num_helpers + 1) * sizeof *helpers);
    double *sums = measures ? malloc((size_t)(num_pieces + 1) * 2 * sizeof *sums) : NULL;
    const int has_memory = first_piece && helpers && (sums || !measures);
    if (has_memory) {
        first_piece[0] = 0;
        for (int64_t range = 0; range < num_ranges; range++)
            first_piece[range + 1] = first_piece[range] + (ranges[range].n + piece - 1) / piece;
        struct job job = {update, ranges, first_piece, num_pieces, sums, 0};
        work_together(&job, helpers, num_helpers);
        if (measures)
            add_pieces(&job, num_ranges, measures);
    }
    free(first_piece);
    free(helpers);
    free(sums);
    return has_memory ? 0 : -1;
}

/* For each instruction set: update_on_NAME is `run` with its loops, and supports_NAME says whether this processor can. */
#define VARIANT(name, target, supported)                                                                               \
    static target void update_##name(const struct range *range, int64_t from, int64_t n, double *measure) {            \
        update(range, from, n, measure);                                                                               \
    }                                                                                                                  \
    EXPORT int update_on_##name(const struct range *ranges, int64_t num_ranges, int64_t num_threads,                   \
                            double *measures) {                                                                        \
        return run(update_##name, ranges, num_ranges, num_threads, measures);                                          \
    }                                                                                                                  \
    EXPORT int supports_##name(void) {                                                                                 \
        return supported;                                                                                              \
    }

VARIANT(baseline, , 1)

#if defined(__x86_64__)
#define HAS(feature) (__builtin_cpu_supports(feature) != 0)
VARIANT(avx2, __attribute__((target("avx2"))), HAS("avx2"))
VARIANT(avx512, AVX512, HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl"))
#endif

/* What this library was built from (optim/compiler.py), so that one left over from an older source is not used. */
EXPORT const char *build_hash(void) {
    return BUILD_HASH;
}
