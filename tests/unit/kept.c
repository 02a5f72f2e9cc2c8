/* kept.c - a build that keeps capacities and training, but nothing that changes with steps
   (MOE_KEEP_EXTRAS): the capacity of LocMoE holds, and what needs steps is refused by name.
     cc -std=c99 -O1 -I. tests/unit/kept.c -o kept -lm && ./kept */

#define MOE_NO_SIMD
#define MOE_KEEP_EXTRAS 5 /* capacity, training */
#define MOE_IMPLEMENTATION
#include "moe_routers.h"
#include "../test.h"

enum { WIDTH = 8, EXPERTS = 4, TOKENS = 16 };

static moe_router_config config_of(const char *settings) {
    moe_router_config c;
    memset(&c, 0, sizeof c);
    CHECK_STATUS(moe_fields_apply(moe_router_fields(), &c, settings, NULL), MOE_OK, settings);
    c.d_model = WIDTH;
    c.n_experts = EXPERTS;
    return c;
}

/* All tokens are the vector of one expert: C_min = exp(8) / 4 is more than there are, and all
   stay. */
static void test_bound(void) {
    static moe_real weight[EXPERTS * WIDTH], x[TOKENS * WIDTH];
    static unsigned char memory[1 << 14];
    const moe_router_config c = config_of("top_k=1 weight=raw capacity_bound=every");
    moe_router router;
    moe_routing routing;
    moe_call call;
    size_t i;
    memset(&call, 0, sizeof call);
    for (i = 0; i < EXPERTS; i++) weight[i * WIDTH + i] = 1;
    for (i = 0; i < TOKENS; i++) x[i * WIDTH] = 1;
    if (!CHECK_STATUS(moe_router_init(&router, &c, NULL, NULL), MOE_OK)) return;
    router.tensors[MOE_ROUTER_WEIGHT] = weight;
    call.n_tokens = TOKENS;
    call.x = x;
    CHECK_STATUS(moe_route(&router, &call, memory, sizeof memory, &routing), MOE_OK);
    CHECK(routing.capacity == TOKENS && routing.n_dropped == 0);
}

static void test_refused(void) {
    const moe_router_config c = config_of("compete_rate=0.5 loss_distill=1");
    moe_error error;
    CHECK_STATUS(moe_router_check(&c, NULL, &error), MOE_ERR_UNSUPPORTED);
    CHECK(strstr(error.message, "compete_rate = 0.5: a MOE_KEEP_ ") == error.message, error.message);
}

int main(void) {
    CASE(test_bound());
    CASE(test_refused());
    return test_end();
}
