/* The MoE layer as a lecture: forward and backward as plain loops, compared with the library.
     cc -std=c99 -O2 -I. examples/lecture.c -o lecture -lm && ./lecture
   or: sh examples/run lecture

   For each of N tokens x_t, a row of D numbers, a router selects K of E experts, small networks
   with their own weights, and adds up their weighted outputs:
     z = R x                                        scores, one per expert
     p = softmax(z)                                 probabilities
     S = the K experts with the largest p           only these run: compute grows with K, not with E
     w_e = p_e / (sum of p over S), for e in S      weights
     f_e(x) = Down_e (silu(Gate_e x) * (Up_e x))    a swiglu expert; silu(g) = g / (1 + exp(-g))
     y = sum over e in S of w_e f_e(x)
   The backward pass takes dy = dL/dy and computes the gradient of L with respect to x and every
   weight. "d" in front of a name is always the gradient with respect to it, of the same shape. The
   selection S is piecewise constant and has no gradient: the router learns through the weights w
   only. */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "cli.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* tokens, width, hidden width, experts, experts per token */
enum { N = 16, D = 12, F = 20, E = 8, K = 2 };

/* Weights, in the shapes of the library and its files, and their gradients. */
static float R[E][D], Gate[E][F][D], Up[E][F][D], Down[E][D][F];
static float dR[E][D], dGate[E][F][D], dUp[E][F][D], dDown[E][D][F];
static float x[N][D], y[N][D], dy[N][D], dx[N][D];

/* Stored by the forward pass for the backward pass. */
static float p[N][E];                /* probabilities */
static int S[N][K];                  /* the chosen experts */
static float w[N][K];                /* their weights */
static float g[N][K][F], u[N][K][F]; /* Gate_e x and Up_e x */
static float h[N][K][F];             /* silu(g) * u */
static float o[N][K][D];             /* f_e(x) = Down_e h */

static float sigmoid(float v) { return 1 / (1 + expf(-v)); }

/* y [N,D] = layer(x [N,D]) */
static void forward(void) {
    memset(y, 0, sizeof y);
    for (int t = 0; t < N; t++) {
        /* scores z = R x, and their softmax; the largest score is subtracted so that exp does not
           overflow */
        float z[E] = {0}, largest = -INFINITY;
        float sum = 0;
        for (int e = 0; e < E; e++)
            for (int i = 0; i < D; i++) z[e] += R[e][i] * x[t][i];
        for (int e = 0; e < E; e++) largest = fmaxf(largest, z[e]);
        for (int e = 0; e < E; e++) sum += p[t][e] = expf(z[e] - largest);
        for (int e = 0; e < E; e++) p[t][e] /= sum;

        /* top-k: K times the best remaining expert; ties go to the first */
        int taken[E] = {0};
        float chosen = 0;
        for (int k = 0; k < K; k++) {
            int best = -1;
            for (int e = 0; e < E; e++)
                if (!taken[e] && (best < 0 || p[t][e] > p[t][best])) best = e;
            taken[best] = 1;
            S[t][k] = best;
            chosen += p[t][best];
        }

        /* each chosen expert runs on the token; y is the weighted sum */
        for (int k = 0; k < K; k++) {
            const int e = S[t][k];
            w[t][k] = p[t][e] / chosen;
            for (int f = 0; f < F; f++) {
                g[t][k][f] = u[t][k][f] = 0;
                for (int i = 0; i < D; i++) g[t][k][f] += Gate[e][f][i] * x[t][i];
                for (int i = 0; i < D; i++) u[t][k][f] += Up[e][f][i] * x[t][i];
                h[t][k][f] = g[t][k][f] * sigmoid(g[t][k][f]) * u[t][k][f];
            }
            for (int i = 0; i < D; i++) {
                o[t][k][i] = 0;
                for (int f = 0; f < F; f++) o[t][k][i] += Down[e][i][f] * h[t][k][f];
                y[t][i] += w[t][k] * o[t][k][i];
            }
        }
    }
}

/* Computes dx [N,D] and the gradients of all weights from dy [N,D]. The blocks are those of forward
   in reverse order. */
static void backward(void) {
    for (int t = 0; t < N; t++) {
        float dw[K] = {0}, dp[E] = {0};
        float chosen = 0, mean = 0;

        /* y = sum w o:   do = w dy,   dw = dy . o;   then back through the expert */
        for (int k = 0; k < K; k++) {
            const int e = S[t][k];
            for (int i = 0; i < D; i++) dw[k] += dy[t][i] * o[t][k][i];
            for (int f = 0; f < F; f++) {
                /* o = Down h:   dDown += do h^T,   dh = Down^T do */
                float dh = 0;
                for (int i = 0; i < D; i++) dh += Down[e][i][f] * w[t][k] * dy[t][i];
                for (int i = 0; i < D; i++) dDown[e][i][f] += w[t][k] * dy[t][i] * h[t][k][f];
                /* h = silu(g) u:   du = dh silu(g),   dg = dh u silu'(g)
                   with s = sigmoid(g):   silu(g) = g s,   silu'(g) = s (1 + g (1 - s)) */
                const float s = sigmoid(g[t][k][f]), du = dh * g[t][k][f] * s;
                const float dg = dh * u[t][k][f] * s * (1 + g[t][k][f] * (1 - s));
                /* g = Gate x, u = Up x:   dGate += dg x^T,   dUp += du x^T,
                   dx += Gate^T dg + Up^T du */
                for (int i = 0; i < D; i++) {
                    dGate[e][f][i] += dg * x[t][i];
                    dUp[e][f][i] += du * x[t][i];
                    dx[t][i] += Gate[e][f][i] * dg + Up[e][f][i] * du;
                }
            }
        }

        /* w_k = p_k / chosen:   dp_k = (dw_k - sum_j w_j dw_j) / chosen; experts outside S get 0 */
        for (int k = 0; k < K; k++) chosen += p[t][S[t][k]];
        for (int k = 0; k < K; k++) mean += w[t][k] * dw[k];
        for (int k = 0; k < K; k++) dp[S[t][k]] = (dw[k] - mean) / chosen;

        /* p = softmax(z):   dz_e = p_e (dp_e - sum_j p_j dp_j)
           z = R x:   dR += dz x^T,   dx += R^T dz */
        mean = 0;
        for (int e = 0; e < E; e++) mean += p[t][e] * dp[e];
        for (int e = 0; e < E; e++) {
            const float dz = p[t][e] * (dp[e] - mean);
            for (int i = 0; i < D; i++) {
                dR[e][i] += dz * x[t][i];
                dx[t][i] += R[e][i] * dz;
            }
        }
    }
}

/* Prints |a - b| / |b| of two arrays; returns 1 if it is too large. */
static int differs(const char *name, size_t n, const float *a, const float *b) {
    double apart = 0, size = 0;
    for (size_t i = 0; i < n; i++) {
        apart += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    printf("  %-6s %4zu numbers, relative difference %.1e\n", name, n, sqrt(apart / size));
    return !(sqrt(apart / size) <= 1e-5); /* NaN differs too */
}

static int fail(const char *why) {
    fprintf(stderr, "lecture: %s\n", why);
    return 1;
}

int main(int count, char **words) {
    static const struct {
        const char *tensor, *name;
        float *values, *gradient;
    } weights[] = {{"router.weight", "dR", R[0], dR[0]},
                   {"experts.gate", "dGate", Gate[0][0], dGate[0][0]},
                   {"experts.up", "dUp", Up[0][0], dUp[0][0]},
                   {"experts.down", "dDown", Down[0][0], dDown[0][0]}};
    static float its_y[N][D], its_dx[N][D];
    static double workspace[1 << 15];
    moe_layer_config config = {.router = {.d_model = D, .n_experts = E, .top_k = K}, .d_ff = F};
    moe_call call = {.n_tokens = N, .x = x[0], .training = 1};
    moe_layer layer;
    moe_layer_pass pass;
    moe_tensor tensor;
    moe_error error;
    moe_rng rng;
    int wrong = 0;
    int ended = only_help(count, words, "lecture", "runs the MoE layer as plain loops, compares it with the library");
    if (ended >= 0) return ended;

    /* The library's layer starts with random weights; the lecture copies them. */
    if (moe_layer_create(&layer, &config, 1, 7, NULL, &error) != MOE_OK) return fail(error.message);
    for (int i = 0; i < 4; i++) {
        if (moe_layer_find(&layer, weights[i].tensor, &tensor) != MOE_OK) return fail(weights[i].tensor);
        memcpy(weights[i].values, tensor.data, tensor.count * sizeof *tensor.data);
    }
    moe_rng_seed(&rng, 8);
    for (int i = 0; i < N * D; i++) x[i / D][i % D] = moe_rng_normal(&rng);
    for (int i = 0; i < N * D; i++) dy[i / D][i % D] = moe_rng_normal(&rng);

    forward();
    backward();
    if (moe_layer_forward(&layer, &call, its_y[0], workspace, sizeof workspace, &pass) != MOE_OK)
        return fail("moe_layer_forward");
    if (moe_layer_backward(&layer, dy[0], its_dx[0], NULL, &pass) != MOE_OK) return fail("moe_layer_backward");

    printf("%d tokens, each through %d of %d experts; the plain loops against the library:\n", N, K, E);
    wrong |= differs("y", N * D, y[0], its_y[0]);
    wrong |= differs("dx", N * D, dx[0], its_dx[0]);
    for (int i = 0; i < 4; i++)
        if (moe_layer_find(&layer, weights[i].tensor, &tensor) == MOE_OK)
            wrong |= differs(weights[i].name, tensor.count, weights[i].gradient, tensor.gradient);
    moe_layer_free(&layer);
    if (wrong) return fail("a difference is above 1e-5");
    return fflush(stdout) != 0 ? fail("the output cannot be written") : 0;
}
