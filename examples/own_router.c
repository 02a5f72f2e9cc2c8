/* A router of one's own: trained in a network, saved, loaded, compared with the linear score.
     cc -std=c99 -O2 -I. examples/own_router.c -o own_router -lm && ./own_router
   z_e = -|u - c_e|^2 with trained centers c [E,D]; chosen is every expert less than 1 behind the
   nearest. All else is the library's: gate, weights, losses, backward pass, optimizer, files. */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include <stdio.h>
#include <string.h>

enum { D = 2, E = 4, N = 512 };

static moe_status score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u, moe_real *z) {
    size_t i;
    (void)ctx;
    for (i = 0; i < call->n_tokens * E; i++) z[i] = 0;
    for (i = 0; i < call->n_tokens * E * D; i++) {
        moe_real away = u[i / (E * D) * D + i % D] - router->tensors[MOE_ROUTER_CUSTOM][i % (E * D)];
        z[i / D] -= away * away;
    }
    return MOE_OK;
}

/* dz_e/du = -2 (u - c_e), dz_e/dc_e = 2 (u - c_e); dc is NULL where the centers are frozen. */
static moe_status score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                 const moe_real *dz, moe_real *du, moe_real *dc) {
    size_t i;
    (void)ctx;
    for (i = 0; i < call->n_tokens * E * D; i++) {
        size_t at = i / (E * D) * D + i % D;
        moe_real slope = 2 * (u[at] - router->tensors[MOE_ROUTER_CUSTOM][i % (E * D)]) * dz[i / D];
        du[at] -= slope;
        if (dc != NULL) dc[i % (E * D)] += slope;
    }
    return MOE_OK;
}

static moe_status near_ones(void *ctx, const moe_router *router, const moe_call *call, const moe_real *z,
                            const moe_real *p, unsigned char *chosen) {
    size_t i, e;
    (void)ctx;
    (void)router;
    (void)p;
    for (i = 0; i < call->n_tokens * E; i++) {
        chosen[i] = 1;
        for (e = i / E * E; e < i / E * E + E; e++) chosen[i] &= z[i] > z[e] - 1;
    }
    return MOE_OK;
}

static const moe_custom own = {NULL, score, score_backward, near_ones, E * D};

/* A trained network: one mixture with these settings. */
static moe_status train(moe_net *net, const char *settings, const moe_data *data, moe_error *error) {
    moe_layer_config mixture = {0};
    moe_train_config training = {0};
    moe_net_init(net, D, MOE_KERNELS_AUTO, NULL);
    if (moe_fields_apply(moe_layer_fields(), &mixture, settings, error) != MOE_OK) return MOE_ERR_CONFIG;
    moe_net_mixture(net, &mixture);
    if (moe_net_build(net, 1, 3, error) != MOE_OK) return MOE_ERR_CONFIG;
    net->modules[0].layer.router.custom = own; /* the linear score has no use for it */
    training.criterion = MOE_CRITERION_SQUARED_ERROR;
    training.rate = (moe_real)0.02;
    training.epochs = 200;
    return moe_fit(net, data, NULL, &training, error);
}

int main(int argc, char *argv[]) {
    static moe_real x[N * D], target[N * D];
    static const char path[] = "own_router.safetensors";
    moe_net net[3] = {{0}};
    moe_evaluation result[3];
    moe_data data = {0};
    moe_error error = {0};
    moe_rng rng = {7};
    int i, failed;
    if (argc > 1) return puts("own_router: trains a router of one's own") < 0 || strcmp(argv[1], "-h") != 0;
    for (i = 0; i < N * D; i++) {
        x[i] = moe_rng_normal(&rng);
        target[i] = x[i] < 0 ? -x[i] : x[i]; /* linear in each quadrant */
    }
    data.n = N;
    data.x = x;
    data.targets = target;
    failed = train(&net[0], "n_experts=4 top_k=2 router_bias=1 expert=linear", &data, &error) ||
             train(&net[1], "n_experts=4 score=custom custom_parameters=8 select=custom expert=linear", &data,
                   &error) ||
             moe_net_save(&net[1], path, &error) ||
             moe_net_load(&net[2], path, 0, MOE_KERNELS_AUTO, NULL, &error);
    if (!failed) net[2].modules[0].layer.router.custom = own; /* a file holds no functions */
    for (i = 0; i < 3 && !failed; i++)
        failed = moe_evaluate(&net[i], &data, MOE_CRITERION_SQUARED_ERROR, &result[i], &error) != MOE_OK;
    if (failed) puts(error.message);
    else printf("mean squared error: linear score %.4f, own router %.4f, loaded %.4f\n", (double)result[0].loss,
                (double)result[1].loss, (double)result[2].loss);
    for (i = 0; i < 3; i++) moe_net_free(&net[i]);
    remove(path);
    return failed || result[1].loss != result[2].loss;
}
