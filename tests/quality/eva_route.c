/* eva_route.c - an entry for Frama-C's Eva: a router of floats, made by moe_router_init, that
   routes a few tokens by moe_route. tests/quality/static.sh runs it; no program.

   One run stands for 1 to TOKENS tokens of width 2, 1 to EXPERTS experts, every top_k up to
   CHOICES, and all inputs and weights within +-1e15; with EXACTLY, for these three numbers as they
   are. The router is the default one (score linear, gate softmax, weights p / sum p), with
   drop_capacity = CAPACITY. No alarm means: no runtime error in moe_router_init, moe_route_size and
   moe_route for any of them, and that what the caller reads of the plan has been written.
   Infinities and NaN are no runtime errors; to make an integer of one is.
   Eva knows a range of each number, so it follows every order of the scores, and those where some
   cannot be selected: a token that takes 2 of 4 experts has 17 outcomes, one that takes 3 has 41,
   and each token multiplies the cases. static.sh proves 1 token and up to 4 experts with up to 3
   choices; 2 tokens, 4 experts and 1, 2 or 3 choices, and up to 3 experts with up to 2; 3 tokens, 4
   experts and 1 or 2 choices, and up to 2 experts with up to 2.
   The arrays of a routing stand one behind the other in the workspace, where an index one too
   large would meet the next array. So static.sh makes copies of the headers in which each of them
   has memory of its own; two pairs, which one memset fills, stay together. With WHOLE it does not:
   then no more is shown than that nothing leaves a workspace as short as moe_route_size allows. */

#define MOE_NO_TRAIN
#define MOE_NO_QUANT
#define MOE_NO_SIMD
#define MOE_NO_LIBM
#define MOE_IMPLEMENTATION
#include "__fc_builtin.h"
#include <stddef.h>

void *malloc(size_t bytes);

#define EVA_ARRAY(type, array, length) array = (type *)malloc((length) * sizeof(type));
/* At the end of moei_common_layout; the last array must end within the bytes that were taken. */
#define EVA_APART \
    (void)(1 / (r->kept + pairs <= (unsigned char *)r->plan.offsets + bytes)); \
    EVA_ARRAY(size_t, r->plan.offsets, experts + 1) \
    EVA_ARRAY(size_t, r->counts, 2 * experts) \
    EVA_ARRAY(int32_t, r->choices, pairs) \
    EVA_ARRAY(int32_t, r->n_choices, n) \
    EVA_ARRAY(int32_t, m->order, order) \
    EVA_ARRAY(moe_real, r->logits, n * columns) \
    EVA_ARRAY(moe_real, r->gate, n * columns) \
    EVA_ARRAY(moe_assignment, r->plan.assignments, pairs) \
    EVA_ARRAY(moe_real, r->choice_weights, pairs) \
    EVA_ARRAY(moe_real, m->column, n) \
    EVA_ARRAY(moe_real, m->row, 3 * wide) \
    r->weights = (moe_real *)malloc(cells * (sizeof(moe_real) + 1)); \
    EVA_ARRAY(unsigned char, r->kept, pairs) \
    r->first_counts = r->counts + experts; \
    r->probabilities = r->gate; \
    m->base_weights = r->choice_weights; \
    r->selected = (unsigned char *)(void *)(r->weights + cells);
/* Stands for a > b in a copy of moe_kernels.h. What Eva would learn of the two scores, that one is
   not the largest number there is, would only keep alike states apart. */
static int eva_above(float a, float b) {
    (void)a;
    (void)b;
    return Frama_C_interval(0, 1);
}
#include "moe_routers.h"

/* The memory below is aligned: Eva knows nothing of the bits of an address. */
/*@ assigns \result \from memory;
    ensures \result.base == (unsigned char *)memory;
    ensures \result.used == MOEI_ALIGN - 1 && \result.overflow == 0; */
static moei_layout moei_layout_begin(void *memory);

#ifndef CAPACITY
#define CAPACITY 0 /* no limit */
#endif

#ifdef EXACTLY
#define LEAST(most) (most)
#else
#define LEAST(most) 1
#endif

enum { D = 2 };

static moe_real *some(size_t n) {
    moe_real *x = (moe_real *)malloc(n * sizeof *x);
    size_t i;
    for (i = 0; i < n; i++) x[i] = Frama_C_float_interval(-1e15f, 1e15f);
    return x;
}

int main(void) {
    moe_router_config config = {0};
    moe_call call = {0};
    moe_router router;
    moe_routing routing;
    size_t i, bytes;
    const int n = Frama_C_interval_split(LEAST(TOKENS), TOKENS);
    const int experts = Frama_C_interval_split(LEAST(EXPERTS), EXPERTS), most = experts < CHOICES ? experts : CHOICES;
    config.d_model = D;
    config.n_experts = experts;
    config.top_k = Frama_C_interval_split(LEAST(most), most);
    config.drop_capacity = CAPACITY;
    if (moe_router_init(&router, &config, NULL, NULL) != MOE_OK) return 1;
    router.tensors[MOE_ROUTER_WEIGHT] = some((size_t)experts * D);
    call.n_tokens = (size_t)n;
    call.x = some(call.n_tokens * D);
    if (moe_route_size(&router, call.n_tokens, 0, &bytes) != MOE_OK) return 1;
    if (moe_route(&router, &call, malloc(bytes - (MOEI_ALIGN - 1)), bytes, &routing) != MOE_OK) return 1;
    for (i = 0; i < routing.plan.offsets[experts]; i++) {
        const moe_assignment *a = &routing.plan.assignments[i];
        if (n == TOKENS && experts == EXPERTS && a->choice == CHOICES - 1) Frama_C_show_each_last(a->token);
    }
    return 0;
}
