/* A router of one's own: score with trained parameters and selection, in a network that is trained,
   saved, loaded and compared with the linear score of the library.
     cc -std=c99 -O2 -I. examples/own_router.c -o own_router -lm && ./own_router [FILE]
   or: sh examples/run own_router

   z_e = -|u - c_e|^2, the centers c are trained; S = the nearest expert, and every other one whose
   logit is less than 2 behind. The library adds all else: gate, weights, losses, backward pass of
   what follows, optimizer, files. */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include <stdio.h>
#include <string.h>

enum { D = 2, E = 6, N = 512 };

static moe_status score(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u, moe_real *z) {
    const moe_real *c = router->tensors[MOE_ROUTER_CUSTOM];
    size_t t, e, q;
    (void)ctx;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < E; e++)
            for (q = 0, z[t * E + e] = 0; q < D; q++) {
                moe_real away = u[t * D + q] - c[e * D + q];
                z[t * E + e] -= away * away;
            }
    return MOE_OK;
}

/* dz_e/du = -2 (u - c_e), dz_e/dc_e = 2 (u - c_e). */
static moe_status score_backward(void *ctx, const moe_router *router, const moe_call *call, const moe_real *u,
                                 const moe_real *dz, moe_real *du, moe_real *dc) {
    const moe_real *c = router->tensors[MOE_ROUTER_CUSTOM];
    size_t t, e, q;
    (void)ctx;
    for (t = 0; t < call->n_tokens; t++)
        for (e = 0; e < E; e++)
            for (q = 0; q < D; q++) {
                moe_real slope = 2 * (u[t * D + q] - c[e * D + q]) * dz[t * E + e];
                du[t * D + q] -= slope;
                if (dc != NULL) dc[e * D + q] += slope;
            }
    return MOE_OK;
}

static moe_status near_ones(void *ctx, const moe_router *router, const moe_call *call, const moe_real *z,
                            const moe_real *p, unsigned char *chosen) {
    size_t t, e;
    (void)ctx;
    (void)router;
    (void)p;
    for (t = 0; t < call->n_tokens; t++) {
        moe_real best = z[t * E];
        for (e = 1; e < E; e++) best = z[t * E + e] > best ? z[t * E + e] : best;
        for (e = 0; e < E; e++) chosen[t * E + e] = z[t * E + e] > best - 2;
    }
    return MOE_OK;
}

static const moe_custom own = {NULL, score, score_backward, near_ones, E * D};

static int fail(const moe_error *error) {
    puts(error->message);
    return 1;
}

static int make(moe_net *net, const char *settings, moe_error *error) {
    moe_layer_config c = {0};
    moe_net_init(net, D, MOE_KERNELS_AUTO, NULL);
    if (moe_fields_apply(moe_layer_fields(), &c, settings, error) != MOE_OK) return 0;
    moe_net_mixture(net, &c);
    return moe_net_build(net, 1, 3, error) == MOE_OK;
}

int main(int count, char **words) {
    static const moe_real at[6][D] = {{2, 0}, {1, 2}, {-1, 2}, {-2, 0}, {-1, -2}, {1, -2}}; /* clusters, and */
    static const moe_real turn[6][D] = {{0, 1}, {1, 0}, {0, -1}, {-1, 0}, {1, 1}, {2, -1}}; /* what they do to x */
    static moe_real x[N * D], target[N * D];
    const char *path = count > 1 ? words[1] : "own_router.safetensors";
    moe_net net = {0}, linear = {0};
    moe_net loaded = {0};
    moe_train_config training = {0};
    moe_evaluation mine, theirs, again;
    moe_data data = {0};
    moe_error error;
    moe_rng rng = {7};
    int i, k;
    if (count > 1 && (strcmp(path, "-h") == 0 || strcmp(path, "--help") == 0)) {
        puts("own_router [FILE]   trains a network with a router of its own, saves it in FILE and loads it");
        return 0;
    }
    for (i = 0; i < N; i++) {
        k = (int)moe_rng_below(&rng, 6);
        x[i * D] = at[k][0] + (moe_real)0.4 * moe_rng_normal(&rng);
        x[i * D + 1] = at[k][1] + (moe_real)0.4 * moe_rng_normal(&rng);
        target[i * D] = turn[k][0] * x[i * D] - turn[k][1] * x[i * D + 1];
        target[i * D + 1] = turn[k][1] * x[i * D] + turn[k][0] * x[i * D + 1];
    }
    data.n = N;
    data.x = x;
    data.targets = target;
    training.criterion = MOE_CRITERION_SQUARED_ERROR;
    training.epochs = 300;
    training.rate = (moe_real)0.02;
    if (!make(&net, "n_experts=6 score=custom custom_parameters=12 select=custom expert=linear", &error) ||
        !make(&linear, "n_experts=6 top_k=2 router_bias=1 expert=linear", &error))
        return fail(&error);
    net.modules[0].layer.router.custom = own; /* before the first call */
    if (moe_fit(&net, &data, NULL, &training, &error) || moe_fit(&linear, &data, NULL, &training, &error) ||
        moe_net_save(&net, path, &error) || moe_net_load(&loaded, path, 0, MOE_KERNELS_AUTO, NULL, &error))
        return fail(&error);
    loaded.modules[0].layer.router.custom = own; /* a file holds the centers, but no functions */
    if (moe_evaluate(&net, &data, training.criterion, &mine, &error) ||
        moe_evaluate(&linear, &data, training.criterion, &theirs, &error) ||
        moe_evaluate(&loaded, &data, training.criterion, &again, &error))
        return fail(&error);
    printf("mean loss: centers %.4f, linear top 2 %.4f; loaded again %.4f\n", (double)mine.loss, (double)theirs.loss,
           (double)again.loss);
    moe_net_free(&net);
    moe_net_free(&linear);
    moe_net_free(&loaded);
    remove(path);
    return memcmp(&mine.loss, &again.loss, sizeof mine.loss) != 0 || mine.loss > (moe_real)0.1;
}
