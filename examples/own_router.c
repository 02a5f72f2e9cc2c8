/* A router of one's own: trained in a network, saved, loaded, compared with the linear score.
     cc -std=c99 -O2 -I. examples/own_router.c -o own_router -lm && ./own_router
   z_e = -|u - c_e|^2 with trained centers c [E,D]; chosen is every expert with p above ctx. All
   else is the library's: gate, weights, losses, backward pass, optimizer, files. */
#define MOE_IMPLEMENTATION
#include "moe.h"
#include <stdio.h>
#include <string.h>

enum { D = 2, E = 4, N = 512 };

static moe_status score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u, moe_real *z) {
    size_t i;
    memset(z, 0, call->n_tokens * E * sizeof *z);
    for (i = 0; i < call->n_tokens * E * D; i++) {
        const moe_real away = u[i / (E * D) * D + i % D] - router->tensors[MOE_ROUTER_CUSTOM][i % (E * D)];
        z[i / D] -= away * away;
    }
    return ctx != NULL ? MOE_OK : MOE_ERR_ARGUMENT;
}

/* dz_e/dc_e = 2 (u - c_e) = -dz_e/du; dc is NULL where the centers are frozen. */
static moe_status score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                 const moe_real *dz, moe_real *du, moe_real *dc) {
    size_t i;
    for (i = 0; i < call->n_tokens * E * D; i++) {
        const size_t at = i / (E * D) * D + i % D;
        const moe_real slope = 2 * (u[at] - router->tensors[MOE_ROUTER_CUSTOM][i % (E * D)]) * dz[i / D];
        du[at] -= slope;
        if (dc != NULL) dc[i % (E * D)] += slope;
    }
    return ctx != NULL ? MOE_OK : MOE_ERR_ARGUMENT;
}

static moe_status probable_ones(void *ctx, const moe_router *router, const moe_call *call, const moe_real *z,
                                const moe_real *p, unsigned char *chosen) {
    size_t i;
    for (i = 0; i < call->n_tokens * E; i++) chosen[i] = p[i] > *(const moe_real *)ctx;
    return router != NULL && z != NULL ? MOE_OK : MOE_ERR_ARGUMENT;
}

int main(int argc, char *argv[]) {
    static const char path[] = "own_router.safetensors", *const settings[] = {
        "n_experts=4 expert=linear router_bias=1",
        "n_experts=4 expert=linear score=custom select=custom custom_parameters=8"};
    static moe_real x[N * D], target[N * D], least = (moe_real)0.2;
    const moe_custom own = {&least, score, score_backward, probable_ones, E * D};
    moe_train_config training = {0};
    moe_net net[3] = {{0}};
    moe_evaluation result[3] = {{0}};
    moe_data data = {0};
    moe_error error = {0};
    moe_rng rng = {7};
    int i, failed = 0;
    if (argc > 1) return puts("own_router: trains a router of one's own") < 0 || strcmp(argv[1], "-h") != 0;
    for (i = 0; i < N * D; i++) {
        x[i] = moe_rng_normal(&rng);
        target[i] = x[i] < 0 ? -x[i] : x[i]; /* linear in each quadrant */
    }
    data.n = N;
    data.x = x;
    data.targets = target;
    training.criterion = MOE_CRITERION_SQUARED_ERROR;
    training.rate = (moe_real)0.02;
    training.epochs = 200;
    for (i = 0; i < 3 && !failed; i++) {
        moe_layer_config mixture = {0};
        if (i < 2) moe_net_init(&net[i], D, MOE_KERNELS_AUTO, NULL);
        failed = i < 2 ? moe_fields_apply(moe_layer_fields(), &mixture, settings[i], &error) ||
                             moe_net_mixture(&net[i], &mixture) || moe_net_build(&net[i], 1, 3, &error)
                       : moe_net_save(&net[1], path, &error) ||
                             moe_net_load(&net[2], path, 0, MOE_KERNELS_AUTO, NULL, &error);
        if (!failed && i > 0) net[i].modules[0].layer.router.custom = own; /* a file holds no functions */
        failed = failed || (i < 2 && moe_fit(&net[i], &data, NULL, &training, &error)) ||
                 moe_evaluate(&net[i], &data, MOE_CRITERION_SQUARED_ERROR, &result[i], &error);
        if (failed) puts(error.message);
        else printf("%s: squared error %.4f\n", i == 0 ? "linear score" : i == 1 ? "own router" : "loaded",
                    (double)result[i].loss);
    }
    for (i = 0; i < 3; i++) moe_net_free(&net[i]);
    return remove(path) || failed || result[1].loss != result[2].loss;
}
