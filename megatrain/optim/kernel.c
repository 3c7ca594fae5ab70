/* The AdamW update on the CPU: optim/formula.py and store/masters.py in one pass over memory.

   Rule: the same bits as those two files. Each operation is rounded once, so this file is compiled with -ffp-contract=off
   and never with -ffast-math or anything that it implies. (-fno-math-errno only lets sqrtf be one instruction, which
   rounds correctly.)

   One body, `adamw_span`, is inlined with constant formats into a function for each instruction set, where the compiler
   makes a vector loop of it. It is bound by memory: 26 bytes a parameter for a split master with bf16 gradients and fp32
   moments, 28 for fp32 throughout. Every line is read once and written once, in place; software prefetch did not help.

   One call updates a whole list of ranges on its own threads, which know nothing of Python: a caller that has released
   the interpreter's lock does not take it again before all is done. No result depends on the number of threads. They
   are started and joined in the call (tens of microseconds each, where a call takes milliseconds), so nothing is left
   that a fork could break, and calls may run at the same time.

   What it gives up: NaNs stay NaNs, with any sign and payload (a split master has one NaN only). */

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
    block = 1024, /* parameters between two sums of a measure: 8 KiB of scratch, which stays in the first cache */
    lanes = 16,   /* partial sums of a measure */
    piece = 1 << 16 /* parameters that a thread takes at a time, and between two sums of a range's measure */
};

/* Fields and order of optim/formula.py:AdamWScalars. */
struct adamw_scalars {
    float clip, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, bias2_sqrt, step_size;
};

/* n parameters with the same scalars. weights: float, or with `low` the upper halves (bf16) of a split master, whose
   lower halves are `low`. grad: float or bf16. */
struct adamw_range {
    void *weights;
    int16_t *low;
    const void *grad;
    float *m;
    float *v;
    int64_t n;
    int32_t grad_is_bf16;
    struct adamw_scalars scalars;
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

/* The formula on parameters [from, from + n). With `old` (n floats, and `change` too) it also writes the weights before
   the step and how much each changed. */
ALWAYS_INLINE void adamw_span(const int split, const int grad_is_bf16, const struct adamw_range r, int64_t from,
                              int64_t n, float *restrict old, float *restrict change) {
    const struct adamw_scalars s = r.scalars;
    float *restrict w32 = (float *)r.weights + from;
    uint16_t *restrict hi = (uint16_t *)r.weights + from;
    int16_t *restrict lo = split ? r.low + from : NULL;
    const float *restrict g32 = (const float *)r.grad + from;
    const uint16_t *restrict g16 = (const uint16_t *)r.grad + from;
    float *restrict m = r.m + from;
    float *restrict v = r.v + from;
    NO_OVERLAP
    for (int64_t i = 0; i < n; i++) {
        const float w = split ? join(hi[i], lo[i]) : w32[i];
        const float g = (grad_is_bf16 ? widen(g16[i]) : g32[i]) * s.clip;
        const float next_m = m[i] * s.beta1 + g * s.one_minus_beta1;
        const float next_v = v[i] * s.beta2 + (g * g) * s.one_minus_beta2;
        const float denominator = sqrtf(next_v) / s.bias2_sqrt + s.eps;
        const float next = w * s.decay - (next_m / denominator) * s.step_size;
        m[i] = next_m;
        v[i] = next_v;
        if (split) {
            const uint32_t bits = bits_to_split(next);
            hi[i] = (uint16_t)((bits + 0x8000u) >> 16);
            lo[i] = (int16_t)bits;
        } else {
            w32[i] = next;
        }
        if (old) {
            old[i] = w;
            change[i] = next - w;
        }
    }
}

/* Adds x[i]^2 to sums[i % lanes]: the order does not depend on the width of the vectors. n is a multiple of lanes. */
ALWAYS_INLINE void add_squares(double *restrict sums, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i += lanes)
        for (int lane = 0; lane < lanes; lane++)
            sums[lane] += (double)x[i + lane] * (double)x[i + lane];
}

/* As adamw_span; measure[0] = sum of squared changes, measure[1] = sum of squared old weights. */
ALWAYS_INLINE void adamw_measured(const int split, const int grad_is_bf16, const struct adamw_range r, int64_t from,
                                  int64_t n, double *measure) {
    float old[block], change[block];
    double old_sums[lanes] = {0}, change_sums[lanes] = {0};
    for (const int64_t end = from + n; from < end; from += block) {
        const int64_t size = end - from < block ? end - from : block;
        adamw_span(split, grad_is_bf16, r, from, size, old, change);
        int64_t padded = size;
        for (; padded % lanes; padded++)
            old[padded] = change[padded] = 0.0f;
        add_squares(change_sums, change, padded);
        add_squares(old_sums, old, padded);
    }
    measure[0] = measure[1] = 0.0;
    for (int lane = 0; lane < lanes; lane++) {
        measure[0] += change_sums[lane];
        measure[1] += old_sums[lane];
    }
}

ALWAYS_INLINE void adamw_format(const int split, const int grad_is_bf16, const struct adamw_range r, int64_t from,
                                int64_t n, double *measure) {
    if (measure)
        adamw_measured(split, grad_is_bf16, r, from, n, measure);
    else
        adamw_span(split, grad_is_bf16, r, from, n, NULL, NULL);
}

ALWAYS_INLINE void adamw_any(const struct adamw_range r, int64_t from, int64_t n, double *measure) {
    if (r.low && r.grad_is_bf16)
        adamw_format(1, 1, r, from, n, measure);
    else if (r.low)
        adamw_format(1, 0, r, from, n, measure);
    else if (r.grad_is_bf16)
        adamw_format(0, 1, r, from, n, measure);
    else
        adamw_format(0, 0, r, from, n, measure);
}

/* Updates parameters [from, from + n) of a range; measure: NULL, or two doubles to write. */
typedef void update_piece(const struct adamw_range *range, int64_t from, int64_t n, double *measure);

/* One call, as its threads see it. */
struct job {
    update_piece *update;
    const struct adamw_range *ranges;
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
static int run(update_piece *update, const struct adamw_range *ranges, int64_t num_ranges, int64_t num_threads,
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

/* For each instruction set: adamw_NAME is `run` with its loops, and supports_NAME says whether this processor can. */
#define VARIANT(name, target, supported)                                                                               \
    static target void update_##name(const struct adamw_range *range, int64_t from, int64_t n, double *measure) {      \
        adamw_any(*range, from, n, measure);                                                                           \
    }                                                                                                                  \
    EXPORT int adamw_##name(const struct adamw_range *ranges, int64_t num_ranges, int64_t num_threads,                 \
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
