/* presets.c - rules that published routers bring along, against numbers worked out by hand: the
   averaged capacity and the affinity sum of LocMoE+, the L1 factor that a network's layers share
   (ReMoE), draws outside training (THOR), schedules that follow the trainer's steps (SMoE-dropout),
   the raw input of Gemma 4, and the width at which factorised experts equal swiglu ones.

     cc -std=c99 -O2 -I. tests/unit/presets.c -o presets -lm && ./presets */

#ifndef TEST_LINKED
#define MOE_IMPLEMENTATION
#endif
#include "../all.h"
#include "../test.h"

static const double bound = sizeof(moe_real) > 4 ? 1e-12 : 2e-5;

/* A trainable layer of a preset and further settings. */
static int layer_of(moe_layer *layer, const char *preset, int d, const char *settings) {
    moe_layer_config c;
    moe_error error;
    memset(&c, 0, sizeof c);
    error.message[0] = '\0';
    CHECK(moe_layer_preset(preset, &c, &error) == MOE_OK, error.message);
    c.router.d_model = d;
    c.d_ff = 4;
    CHECK(moe_fields_apply(moe_layer_fields(), &c, settings, &error) == MOE_OK, error.message);
    return CHECK(moe_layer_create(layer, &c, 1, 5, NULL, &error) == MOE_OK, error.message);
}

/* One call of n tokens; its memory is the caller's to free. */
static void *run_layer(moe_layer *layer, size_t n, const moe_real *x, moe_rng *rng, int training,
                       moe_layer_pass *pass) {
    moe_call call;
    moe_error error;
    size_t bytes = 0, y = n * (size_t)layer->config.d_out * sizeof(moe_real);
    char *work;
    memset(&call, 0, sizeof call);
    error.message[0] = '\0';
    call.n_tokens = n;
    call.x = x;
    call.rng = rng;
    call.training = training;
    call.error = &error;
    CHECK_STATUS(moe_layer_work_size(layer, n, training, &bytes), MOE_OK);
    work = (char *)grab(bytes + y, 1);
    CHECK(moe_layer_forward(layer, &call, (moe_real *)(void *)work, work + y, bytes, pass) == MOE_OK, error.message);
    return work;
}

/* LocMoE+: what is averaged was limited to [1,N]. d 64, E 8, rho 0.9; all tokens at one angle. */
static void test_capacity_average(void) {
    static const struct {
        double delta;
        size_t n;
        double after;
        size_t capacity;
        int clamped;
    } calls[] = {{0.3, 512, 2.550438396533301, 3, 0},
                 {0.5, 512, 53.49539455687996, 54, 1},
                 {0.2, 256, 48.245855101191964, 49, 0},
                 {0.9, 512, 94.62126959107276, 95, 1}};
    moe_layer layer;
    moe_tensor weight, capacity;
    moe_layer_pass pass;
    size_t i, t;
    if (!layer_of(&layer, "glam", 64, "n_experts=8 capacity_bound=every capacity_rho=0.9")) return;
    CHECK(moe_layer_find(&layer, "router.weight", &weight) == MOE_OK &&
          moe_layer_find(&layer, "router.capacity", &capacity) == MOE_OK);
    for (i = 0; i < weight.count; i++) weight.data[i] = i / 64 == i % 64;
    for (i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        moe_real *x = reals(calls[i].n * 64);
        void *work;
        for (t = 0; t < calls[i].n; t++) {
            x[t * 64] = (moe_real)calls[i].delta;
            x[t * 64 + 20] = (moe_real)sqrt(1 - calls[i].delta * calls[i].delta);
        }
        work = run_layer(&layer, calls[i].n, x, NULL, 1, &pass);
        CHECK(pass.routing.capacity == calls[i].capacity && pass.routing.capacity_clamped == calls[i].clamped);
        CHECK_STATUS(moe_layer_observe(&layer, &pass), MOE_OK);
        CHECK_NEAR(capacity.data[0], calls[i].after, 20 * bound * calls[i].after);
        free(work);
        free(x);
    }
    moe_layer_free(&layer);
}

/* LocMoE+: 0.6 of the mean summed affinity of the first training call stays, whatever later calls
   bring; without one it is that of the call. */
static void test_affinity_sum(void) {
    enum { N = 24, D = 16 };
    moe_rng rng;
    moe_real *x, *other;
    moe_layer layer;
    moe_layer_pass pass;
    moe_tensor sum;
    double wanted = 0, kept;
    void *work;
    size_t t, e, served;
    moe_rng_seed(&rng, 3);
    x = normals_of(&rng, N * D, 1);
    other = normals_of(&rng, N * D, 1);
    if (!layer_of(&layer, "locmoe_plus", D, "switch_share=0")) return;
    CHECK(moe_layer_find(&layer, "router.affinity_sum", &sum) == MOE_OK && !(sum.data[0] > 0));
    work = run_layer(&layer, N, x, NULL, 1, &pass);
    for (t = 0; t < N; t++) {
        double best = 0;
        for (e = 0; e < 8; e++)
            if ((double)pass.routing.logits[t * 8 + e] > best) best = (double)pass.routing.logits[t * 8 + e];
        wanted += best;
    }
    wanted *= 0.6 / 8;
    CHECK_STATUS(moe_layer_observe(&layer, &pass), MOE_OK);
    CHECK_NEAR(sum.data[0], wanted, bound * 10);
    free(work);
    work = run_layer(&layer, N, other, NULL, 1, &pass);
    CHECK_STATUS(moe_layer_observe(&layer, &pass), MOE_OK);
    CHECK_NEAR(sum.data[0], wanted, bound * 10);
    for (e = 0; e < 8; e++) { /* the shortest prefix that reaches the sum */
        double least = 1e9;
        for (t = 0, served = 0, kept = 0; t < N; t++)
            if (pass.routing.selected[t * 8 + e]) {
                double z = (double)pass.routing.logits[t * 8 + e];
                kept += z;
                served++;
                if (z < least) least = z;
            }
        CHECK(served <= 1 || kept - least < wanted + 1e-4);
    }
    free(work);
    free(x);
    free(other);
    moe_layer_free(&layer);
}

/* expert_threshold: each training call adds its C-th largest logit of each expert, also where there
   are more experts than are transposed at a time. */
static void test_cutoffs(void) {
    enum { N = 37, D = 6, E = 37, MOST = 5 };
    moe_rng rng;
    moe_real *x;
    moe_layer layer;
    moe_layer_pass pass;
    moe_tensor sum;
    void *work;
    size_t t, e, larger;
    moe_rng_seed(&rng, 12);
    x = normals_of(&rng, N * D, 1);
    if (!layer_of(&layer, "expert_threshold", D, "n_experts=37 capacity_factor=5")) return;
    CHECK_STATUS(moe_layer_find(&layer, "router.cutoff_sum", &sum), MOE_OK);
    work = run_layer(&layer, N, x, NULL, 1, &pass);
    CHECK_STATUS(moe_layer_observe(&layer, &pass), MOE_OK);
    for (e = 0; e < E; e++) {
        for (t = 0, larger = 0; t < N; t++) larger += pass.routing.logits[t * E + e] > sum.data[e];
        CHECK(larger == MOST - 1);
        for (t = 0, larger = 0; t < N; t++) larger += pass.routing.logits[t * E + e] >= sum.data[e];
        CHECK(larger == MOST);
    }
    free(work);
    free(x);
    moe_layer_free(&layer);
}

/* THOR: outside training a token draws by the seed and by itself alone; in training one expert is
   drawn per call. */
static void test_draws(void) {
    enum { N = 64, D = 8, E = 16 };
    moe_rng rng;
    moe_real *x;
    moe_layer layer, other;
    moe_layer_pass pass, again;
    void *work, *more;
    size_t t, e, differ = 0, from_largest = 0;
    size_t used[E] = {0}, experts = 0;
    moe_rng_seed(&rng, 8);
    x = normals_of(&rng, N * D, 1);
    if (!layer_of(&layer, "thor", D, "") || !layer_of(&other, "thor", D, "sample_seed=9")) return;
    work = run_layer(&layer, N, x, NULL, 0, &pass);
    more = run_layer(&other, N, x, NULL, 0, &again);
    for (t = 0; t < N; t++) {
        size_t best = 0;
        for (e = 0; e < E; e++)
            if (pass.routing.logits[t * E + e] > pass.routing.logits[t * E + best]) best = e;
        differ += pass.routing.choices[t] != again.routing.choices[t];
        from_largest += (size_t)pass.routing.choices[t] != best;
        used[pass.routing.choices[t]]++;
    }
    for (e = 0; e < E; e++) experts += used[e] > 0;
    CHECK(differ > N / 2 && from_largest > N / 2 && experts > E / 2, "random experts, other ones by another seed");
    free(more);
    for (t = 0; t < N; t++) {
        more = run_layer(&layer, 1, x + t * D, NULL, 0, &again);
        CHECK(again.routing.choices[0] == pass.routing.choices[t], "alone as among others");
        free(more);
    }
    free(work);
    work = run_layer(&layer, N, x, &rng, 1, &pass);
    for (t = 1; t < N; t++)
        CHECK(pass.routing.choices[t] == pass.routing.choices[0], "one expert per call");
    free(work);
    free(x);
    moe_layer_free(&layer);
    moe_layer_free(&other);
}

static moe_status net_of(moe_net *net, const char *preset, const char *settings, int layers, moe_error *error) {
    moe_layer_config c;
    moe_status status = moe_layer_preset(preset, &c, error);
    if (status == MOE_OK) status = moe_fields_apply(moe_layer_fields(), &c, settings, error);
    moe_net_init(net, 8, MOE_KERNELS_C, NULL);
    for (; layers > 0 && status == MOE_OK; layers--) {
        moe_net_rms_norm(net);
        status = moe_net_mixture(net, &c);
    }
    if (status == MOE_OK) moe_net_linear(net, 3);
    return status == MOE_OK ? moe_net_build(net, 1, 4, error) : status;
}

static moe_real *values(moe_net *net, const char *name) {
    moe_tensor tensor;
    return CHECK(moe_net_find(net, name, &tensor) == MOE_OK, name) ? tensor.data : NULL;
}

/* Past freeze_at every training call takes the experts of the router, as evaluation does. */
static void check_frozen(moe_layer *layer, size_t n, const moe_real *x, moe_real *step) {
    moe_rng rng = {4};
    moe_layer_pass trained, evaluated;
    void *work = run_layer(layer, n, x, &rng, 0, &evaluated);
    int call;
    *step = 3;
    for (call = 0; call < 20; call++) {
        void *own = run_layer(layer, n, x, &rng, 1, &trained);
        CHECK(memcmp(trained.routing.logits, evaluated.routing.logits, n * 5 * sizeof(moe_real)) == 0,
              "nobody competes for a frozen router");
        CHECK(trained.call.activation_width == 0, "and no expert runs for that");
        free(own);
    }
    free(work);
}

/* CompeteSMoE: in training, from a step on, a share of the calls takes the experts with the largest
   response, with weights by it; all others take those of the router. */
static void test_competition(void) {
    enum { N = 6, D = 4, CALLS = 600 };
    moe_layer layer;
    moe_layer_pass pass;
    moe_tensor step;
    moe_rng start = {3}, rng = {3};
    moe_real *x = reals(N * D);
    int by_norm, call, i;
    for (i = 0; i < N * D; i++) x[i] = moe_rng_normal(&start);
    for (by_norm = 0; by_norm < 2; by_norm++) {
        int competed = 0;
        /* what competes does not know of the router's own gate and weights */
        if (!layer_of(&layer, "competesmoe", D, by_norm
                          ? "n_experts=5 compete_rate=0.3 compete_from=2 freeze_at=3 compete=norm"
                          : "n_experts=5 compete_rate=0.3 compete_from=2 freeze_at=3 gate_temperature=3 "
                            "weight=p_norm weight_p=3"))
            return;
        CHECK(moe_layer_find(&layer, "router.step", &step) == MOE_OK, "compete_from follows the step");
        for (call = 0; call < CALLS + 2; call++) {
            int training = call > 0;
            void *work;
            step.data[0] = call < 2 ? 1 : 2;
            work = run_layer(&layer, N, x, &rng, training, &pass);
            if (pass.call.activation_width > 0) competed++;
            if (call < 2) CHECK(competed == 0, "not outside training, not before its step");
            if (pass.call.activation_width > 0) {
                const moe_real *c = pass.routing.logits, *w = pass.routing.choice_weights;
                const int32_t *chosen = pass.routing.choices;
                double one = (double)c[chosen[0]], two = (double)c[chosen[1]];
                double first = by_norm ? 1 / (1 + exp(two - one)) : one / (one + two);
                for (i = 0; i < 5; i++) CHECK(i == chosen[0] || c[i] <= c[chosen[1]], "the largest are taken");
                CHECK_NEAR((double)w[0], first, bound);
                CHECK_NEAR(log((double)pass.routing.gate[chosen[0]] / (double)pass.routing.gate[chosen[1]]), one - two,
                           bound);
                CHECK(pass.routing.loss[MOE_LOSS_DISTILL] > 0, "the router learns");
            } else {
                CHECK(!(pass.routing.loss[MOE_LOSS_DISTILL] > 0), "there is nothing to learn from");
            }
            free(work);
        }
        CHECK(competed > 0.2 * CALLS && competed < 0.4 * CALLS, "at the rate");
        check_frozen(&layer, N, x, step.data);
        moe_layer_free(&layer);
    }
    free(x);
}

/* ReMoE: two layers, 16 tokens, K 2 of E 8. */
static void test_shared_l1(void) {
    static const struct {
        double pairs[2], net, layer[2];
    } steps[] = {{{60, 90}, 1.2e-8, {1.2e-8, 1.2e-8}},
                 {{30, 31}, 1e-8, {1e-8, 1e-8}},
                 {{10, 60}, 1.2e-8, {8.333333333333334e-09, 1.2e-8}}};
    int alone, i;
    for (alone = 0; alone < 2; alone++) {
        moe_net net;
        moe_error error;
        moe_real *load[2], *l1[2];
        moe_tensor found;
        size_t used;
        int m;
        if (!CHECK(net_of(&net, "remoe", alone ? "n_experts=8 d_ff=4 l1_controller=layer" : "n_experts=8 d_ff=4", 2,
                          &error) == MOE_OK, error.message))
            return;
        load[0] = values(&net, "1.router.load");
        load[1] = values(&net, "3.router.load");
        l1[0] = values(&net, alone ? "1.router.l1" : "net.l1");
        l1[1] = values(&net, alone ? "3.router.l1" : "net.l1");
        CHECK(alone == (moe_net_find(&net, "net.l1", &found) != MOE_OK), "one tensor or one for each layer");
        CHECK(alone == (moe_net_find(&net, "3.router.l1", &found) == MOE_OK), "not both");
        CHECK(moe_net_parameter_count(&net, &used) == used, "a token uses all");
        for (m = 1; m < 4; m += 2) {
            moe_tensor of_layer;
            size_t t;
            for (t = 0; moe_layer_tensor(&net.modules[m].layer, t, &of_layer) == MOE_OK; t++) {
                char name[MOE_NAME_SIZE + 8];
                sprintf(name, "%d.%s", m, of_layer.name);
                if (moe_net_find(&net, name, &found) == MOE_OK)
                    CHECK(found.data == of_layer.data && found.gradient == of_layer.gradient, name);
                else CHECK(strcmp(of_layer.name, "router.l1") == 0, name);
            }
        }
        for (i = 0; i < 3; i++) {
            for (m = 0; m < 2; m++) {
                load[m][3] = (moe_real)steps[i].pairs[m];
                load[m][8] = 16;
            }
            CHECK_STATUS(moe_net_advance(&net), MOE_OK);
            for (m = 0; m < 2; m++) {
                const double wanted = alone ? steps[i].layer[m] : steps[i].net;
                CHECK_NEAR(l1[m][0], wanted, bound * wanted);
                CHECK(!(load[m][3] > 0), "counted anew");
            }
        }
        moe_net_free(&net);
    }
}

/* Two layers whose mean is exactly 1 - K/E, one as far above as the other is below: the factor
   falls. Once the one below is frozen, it does not count. */
static void test_shared_l1_border(void) {
    int experts, k, more;
    for (experts = 3; experts <= 7; experts += 2)
        for (k = 1; k < 3; k++) {
            const size_t at = (size_t)experts;
            char settings[80];
            moe_net net;
            moe_error error;
            moe_real *load[2], *l1, before;
            sprintf(settings, "n_experts=%d top_k=%d d_ff=4 freeze_at=20", experts, k);
            if (!CHECK(net_of(&net, "remoe", settings, 2, &error) == MOE_OK, error.message)) return;
            load[0] = values(&net, "1.router.load");
            load[1] = values(&net, "3.router.load");
            l1 = values(&net, "net.l1");
            for (more = 1; more < 10; more++) {
                const double wanted = (double)*l1 / 1.2;
                load[0][0] = (moe_real)(10 * k + more);
                load[1][0] = (moe_real)(10 * k - more);
                load[0][at] = load[1][at] = 10;
                CHECK_STATUS(moe_net_advance(&net), MOE_OK);
                CHECK_NEAR(*l1, wanted, bound * wanted);
            }
            *values(&net, "3.router.step") = 20;
            load[0][0] = (moe_real)(10 * k + 1);
            load[1][0] = (moe_real)(10 * k - 9);
            load[0][at] = load[1][at] = 10;
            before = *l1;
            CHECK_STATUS(moe_net_advance(&net), MOE_OK);
            CHECK(*l1 > before, "the factor rises");
            moe_net_free(&net);
        }
}

/* A schedule without steps of its own follows those of moe_fit, and stays so in the file. */
static void test_trainer_steps(void) {
    enum { N = 32 };
    moe_net net;
    moe_error error;
    moe_data data;
    moe_train_config training;
    moe_rng rng;
    moe_layer_pass pass;
    int32_t labels[N];
    moe_real *x;
    void *work;
    size_t i;
    moe_rng_seed(&rng, 6);
    x = normals_of(&rng, N * 8, 1);
    for (i = 0; i < N; i++) labels[i] = (int32_t)(i % 3);
    memset(&data, 0, sizeof data);
    memset(&training, 0, sizeof training);
    data.n = N;
    data.x = x;
    data.labels = labels;
    training.epochs = 5;
    training.batch = 8;
    if (!CHECK(net_of(&net, "smoe_dropout", "n_experts=6 d_ff=4", 1, &error) == MOE_OK, error.message)) return;
    CHECK(net.modules[1].layer.config.router.k_end == 6 && net.modules[1].layer.config.router.schedule_steps == 0);
    work = run_layer(&net.modules[1].layer, N, x, NULL, 0, &pass);
    CHECK(pass.routing.top_k == 2, "K at the start");
    free(work);
    CHECK(moe_fit(&net, &data, NULL, &training, &error) == MOE_OK, error.message);
    CHECK(net.modules[1].layer.config.router.schedule_steps == 20);
    work = run_layer(&net.modules[1].layer, N, x, NULL, 0, &pass);
    CHECK(pass.routing.top_k == 6, "K at the end");
    free(work);
    training.epochs = 1;
    CHECK(moe_fit(&net, &data, NULL, &training, &error) == MOE_OK, error.message);
    CHECK(net.modules[1].layer.config.router.schedule_steps == 20, "it has steps of its own now");
    free(x);
    moe_net_free(&net);
}

static double net_loss(moe_net *net, const moe_real *x, const moe_real *dy, void *work, size_t bytes,
                       moe_net_pass *pass) {
    moe_call call;
    double sum = 0;
    size_t i;
    memset(&call, 0, sizeof call);
    call.n_tokens = 5;
    call.x = x;
    call.training = 1;
    CHECK_STATUS(moe_net_forward(net, &call, work, bytes, pass), MOE_OK);
    for (i = 0; i < 15; i++) sum += (double)pass->y[i] * (double)dy[i];
    return sum;
}

/* Gemma 4: in a network the router reads what enters the norm before its layer, and passes its
   gradient there. */
static void test_raw_input(void) {
    moe_net net;
    moe_error error;
    moe_net_pass pass;
    moe_rng rng;
    moe_real *x, *dy, *gain, *dx = reals(40);
    size_t bytes = 0, i;
    void *work;
    const double h = sizeof(moe_real) > 4 ? 1e-5 : 2e-3, most = sizeof(moe_real) > 4 ? 1e-7 : 5e-2;
    moe_rng_seed(&rng, 16);
    x = normals_of(&rng, 40, 1);
    dy = normals_of(&rng, 15, 1);
    if (!CHECK(net_of(&net, "gemma4", "n_experts=4 top_k=4 d_ff=5", 2, &error) == MOE_OK, error.message)) return;
    CHECK_STATUS(moe_net_work_size(&net, 5, 1, &bytes), MOE_OK);
    work = grab(bytes, 1);
    gain = values(&net, "0.weight");
    for (i = 0; i < 8; i++) gain[i] = (moe_real)(i + 1) / 4; /* u does not see a norm without gain */
    (void)net_loss(&net, x, dy, work, bytes, &pass);
    for (i = 0; i < 5; i++) {
        const moe_real *u = moe_net_routing(&net, &pass, 1)->u + i * 8, *row = x + i * 8;
        double square = 0, size;
        size_t q;
        for (q = 0; q < 8; q++) square += (double)row[q] * (double)row[q] / 8;
        size = sqrt(square + 1e-6) * sqrt(8.0);
        for (q = 0; q < 8; q++) CHECK_NEAR(u[q], (double)row[q] / size, bound * 10);
    }
    CHECK_STATUS(moe_net_backward(&net, dy, dx, &pass), MOE_OK);
    for (i = 0; i < 40; i++) {
        const moe_real old = x[i];
        double up, down;
        x[i] = old + (moe_real)h;
        up = net_loss(&net, x, dy, work, bytes, &pass);
        x[i] = old - (moe_real)h;
        down = net_loss(&net, x, dy, work, bytes, &pass);
        x[i] = old;
        CHECK_NEAR(dx[i], (up - down) / (2 * h), most * (1 + fabs((double)dx[i])));
    }
    free(work);
    free(x);
    free(dy);
    free(dx);
    moe_net_free(&net);
}

/* AoE: as many parameters as swiglu experts of width 4 d, within one row. */
static void test_parity(void) {
    static const int widths[] = {1, 2, 5, 16, 64, 300};
    size_t i;
    for (i = 0; i < sizeof widths / sizeof widths[0]; i++) {
        moe_layer_config c;
        moe_error error;
        double d = widths[i], low, f, all;
        CHECK_STATUS(moe_layer_preset("aoe", &c, &error), MOE_OK);
        c.router.d_model = widths[i];
        CHECK_STATUS(moe_layer_check(&c, &c, &error), MOE_OK);
        low = c.d_low;
        f = c.d_ff;
        all = low * d + f * (low + 2 * d);
        CHECK(all <= 12 * d * d && all > 12 * d * d - (low + 2 * d));
    }
}

/* A field without effect is refused, unless a preset or a file has set it: then it is reset. */
static void test_reset(void) {
    static const char *const text = "gate_temperature=0.2 gate=relu affinity_mass=0.5";
    moe_router_config c, out;
    moe_error error;
    CHECK_STATUS(moe_router_preset("locmoe_plus", &c, &error), MOE_OK);
    c.d_model = 8;
    CHECK_STATUS(moe_fields_apply(moe_router_fields(), &c, "select=top_k switch_share=0 gate=identity", NULL), MOE_OK);
    CHECK(moe_router_check(&c, &out, &error) == MOE_OK, error.message);
    CHECK(!(out.affinity_sum_auto > 0) && near_to((double)out.gate_temperature, 1, 0) && out.nodes == 2);
    c.gate_temperature = 3; /* not the preset's any more */
    CHECK(moe_router_check(&c, &out, &error) == MOE_ERR_CONFIG, "refused");
    CHECK(strstr(error.message, "gate_temperature = 3") && strstr(error.message, "gate = identity"), error.message);
    CHECK_STATUS(moe_fields_apply(moe_router_fields(), &c, "gate_temperature=0.2 groups=2", &error), MOE_OK);
    CHECK_STATUS(moe_router_check(&c, &out, &error), MOE_ERR_CONFIG);
    CHECK(strstr(error.message, "groups = 2") != NULL, error.message);
    CHECK_STATUS(moe_router_preset("gshard", &c, &error), MOE_OK);
    CHECK_STATUS(moe_fields_apply(moe_router_fields(), &c, "d_model=8 drop_capacity=4", &error), MOE_OK);
    if (CHECK_STATUS(moe_router_check(&c, &out, &error), MOE_OK)) {
        CHECK(!(out.capacity_factor > 0) && !(out.capacity_factor_eval > 0), "both: one is the other's default");
        CHECK(moe_router_check(&out, &out, &error) == MOE_OK, error.message);
    }
    memset(&c, 0, sizeof c);
    c.d_model = 8;
    CHECK_STATUS(moe_fields_apply(moe_router_fields(), &c, text, &error), MOE_OK);
    CHECK_STATUS(moe_router_check(&c, &out, &error), MOE_ERR_CONFIG);
    c.preset = MOEI_OF_A_FILE;
    CHECK_STATUS(moe_router_check(&c, &out, &error), MOE_OK);
    CHECK(strstr(error.message, "gate_temperature, affinity_mass") != NULL, error.message);
    CHECK(near_to((double)out.gate_temperature, 1, 0) && near_to((double)out.affinity_mass, 1, 0) && out.preset == 0);
}

/* What a preset has set for a stage that later settings leave out is reset. */
static void test_left_stages(void) {
    static const char *const rows[][2] = {{"deepseek_v3", "selection_bias=0"},
                                          {"deepseek_v3", "select=soft"},
                                          {"trinity", "bias_rate=0"},
                                          {"expert_threshold", "switch_share=0"},
                                          {"remoe", "select=top_k"},
                                          {"mixture_of_depths", "predictor=0"},
                                          {"mixture_of_depths", "select=threshold"},
                                          {"adamoe", "loss_balance=0"},
                                          {"moe_pp", "n_zero=0 n_copy=0 n_constant=0"},
                                          {"moe_pp", "loss_balance=0 capacity_factor=0 capacity_factor_eval=0"},
                                          {"moe_pp", "weight=raw"},
                                          {"vmoe", "noise=none"},
                                          {"dselect_k", "score=linear"},
                                          {"trinity", "selection_bias=0 n_experts=6"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_router_config c, out;
        moe_error error;
        if (!CHECK(moe_router_preset(rows[i][0], &c, &error) == MOE_OK, rows[i][0])) continue;
        CHECK_STATUS(moe_fields_apply(moe_router_fields(), &c, "d_model=8", &error), MOE_OK);
        CHECK_STATUS(moe_fields_apply(moe_router_fields(), &c, rows[i][1], &error), MOE_OK, error.message);
        if (!CHECK(moe_router_check(&c, &out, &error) == MOE_OK, error.message)) continue;
        CHECK(out.preset == 0 && moe_router_check(&out, NULL, &error) == MOE_OK, error.message);
        c.preset = 0; /* as a user's own settings */
        CHECK_STATUS(moe_router_check(&c, NULL, &error), MOE_ERR_CONFIG, rows[i][1]);
    }
}

/* Sets a field, not a size, to a value of its kind; writes its name. */
static void set_at_random(moe_router_config *c, moe_rng *rng, char *name) {
    const moe_field *field = moe_router_fields();
    char value[40];
    size_t n = 0;
    while (field[n].name != NULL) n++;
    field += moe_rng_below(rng, (uint32_t)n);
    for (n = 0; field->choices != NULL && field->choices[n] != NULL;) n++;
    sprintf(value, "%u", (unsigned)moe_rng_below(rng, field->kind == MOE_FIELD_FLAG ? 2 : 4));
    if (field->kind == MOE_FIELD_REAL) sprintf(value, "%g", 0.25 * (double)moe_rng_below(rng, 7));
    if (n > 0) strcpy(value, field->choices[moe_rng_below(rng, (uint32_t)n)]);
    if (strcmp(field->name, "d_model") != 0 && strcmp(field->name, "n_experts") != 0 &&
        moe_field_set(moe_router_fields(), c, field->name, value, NULL) == MOE_OK)
        strcpy(name, field->name);
}

/* A preset with settings of any kind is refused for one of these, never for what the preset set
   alone; what is accepted has nothing left to reset. */
static void test_later_settings(void) {
    moe_rng rng = {12};
    int trial, accepted = 0, k;
    for (trial = 0; trial < 20000; trial++) {
        const moe_preset *preset = moe_presets() + trial % 70;
        char names[3][40] = {"?", "?", "?"};
        moe_router_config c, out;
        moe_error error;
        CHECK_STATUS(moe_router_preset(preset->name, &c, &error), MOE_OK);
        c.d_model = 8;
        for (k = 0; k < 3; k++) set_at_random(&c, &rng, names[k]);
        if (c.select == MOE_SELECT_HASH || c.student_dim > 0) c.table_size = 9;
        if (moe_router_check(&c, &out, &error) == MOE_OK) {
            accepted++;
            CHECK(moe_router_check(&out, NULL, &error) == MOE_OK, error.message);
        } else {
            CHECK(strstr(error.message, names[0]) != NULL || strstr(error.message, names[1]) != NULL ||
                      strstr(error.message, names[2]) != NULL,
                  error.message);
        }
    }
    CHECKF(accepted > 3000, "%d are accepted", accepted);
}

/* A later kind of experts resets what the preset's kind has alone. */
static void test_left_kinds(void) {
    static const char *const rows[][2] = {
        {"nemotron3", "expert=swiglu"}, {"gpt_oss", "expert=mlp"}, {"grok1", "expert=factorised"}};
    size_t i;
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        moe_layer_config c, out;
        moe_error error;
        CHECK_STATUS(moe_layer_preset(rows[i][0], &c, &error), MOE_OK);
        CHECK_STATUS(moe_fields_apply(moe_router_fields(), &c.router, "d_model=8", &error), MOE_OK);
        CHECK_STATUS(moe_fields_apply(moe_layer_fields(), &c, rows[i][1], &error), MOE_OK);
        CHECK(moe_layer_check(&c, &out, &error) == MOE_OK && moe_layer_check(&out, NULL, &error) == MOE_OK,
              error.message);
        CHECK(out.act == 0 && !(out.swiglu_alpha > 0) && !(out.swiglu_limit > 0) && !out.expert_bias, rows[i][0]);
        c.router.preset = 0;
        CHECK_STATUS(moe_layer_check(&c, NULL, &error), MOE_ERR_CONFIG, rows[i][0]);
    }
}

/* Exact bytes of workspace of a layer of each preset for 24 tokens, forward alone and forward and
   backward, which change when an array does. In float, with plain C's rows and pointers of 64
   bits. */
static void test_workspaces(void) {
    static const struct {
        const char *preset;
        size_t forward, training;
    } rows[] = {
        {"smoe", 13311, 31423}, {"similarity_smoe", 17151, 42175}, {"attention_smoe", 17247, 42271},
        {"similarity_glam", 17151, 42175}, {"attention_glam", 17247, 42271}, {"similarity_xmoe", 18079, 43871},
        {"attention_xmoe", 18175, 43967}, {"similarity_smoe_dropout", 17151, 42175},
        {"attention_smoe_dropout", 17247, 42271}, {"glam", 13311, 31423}, {"switch", 13487, 26799},
        {"gshard", 12543, 29119}, {"noisy_topk", 12543, 39871}, {"vmoe", 12543, 39871}, {"xmoe", 14239, 33119},
        {"xmoe_code", 14239, 33119}, {"smoe_dropout", 21711, 96271}, {"sigma_moe", 13743, 38767},
        {"acmoe", 15935, 34047}, {"acmoe_code", 16095, 34207}, {"acmoe_mix2", 15935, 34047},
        {"acmoe_threshold", 24335, 98895}, {"soft_acmoe", 26575, 44143}, {"aoe", 17247, 38047},
        {"aoe_code", 17247, 38047}, {"aoe_top_p", 20847, 69295}, {"aoe_expert_choice", 23407, 71855},
        {"norm_routing", 42783, 88543}, {"locmoe", 9935, 20943}, {"locmoe_plus", 14127, 53359},
        {"importance_gate", 16431, 51055}, {"dual_temperature", 16431, 51055}, {"attentive_gate", 30255, 77935},
        {"similarity_gate", 16431, 51055}, {"expert_choice", 24271, 98831}, {"mixture_of_depths", 10127, 18543},
        {"base", 11951, 28959}, {"dselect_k", 24591, 100303}, {"thor", 11951, 25263}, {"sinkhorn", 12719, 26799},
        {"soft_moe", 23919, 40975}, {"top_p", 21711, 96271}, {"dynmoe", 21871, 96431}, {"competesmoe", 13311, 158911},
        {"remoe", 21711, 96271}, {"mixtral", 10527, 25567}, {"qwen2_moe", 36959, 102303}, {"qwen3_moe", 56319, 141631},
        {"olmoe", 33791, 94527}, {"deepseek_v2", 71087, 168303}, {"deepseek_v3", 104543, 243615},
        {"deepseek_v4", 103343, 234351}, {"llama4", 15887, 34575}, {"gpt_oss", 53919, 123103}, {"dbrx", 14511, 40687},
        {"grok1", 10527, 25567}, {"phi35_moe", 13311, 31807}, {"granite_moe", 25343, 76863}, {"gemma4", 57183, 142495},
        {"minimax_m2", 101375, 235839}, {"nemotron3", 202287, 455023}, {"moe_pp", 11887, 29615},
        {"adamoe", 17311, 46559}, {"longcat_flash", 283999, 631199}, {"expert_threshold", 24271, 98911},
        {"moge", 42335, 116895}, {"grok2", 10527, 26335}, {"trinity", 102143, 225087}};
    moe_layer_config c;
    moe_layer layer;
    size_t i, bytes[2];
    for (i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        CHECK_STATUS(moe_layer_preset(rows[i].preset, &c, NULL), MOE_OK);
        c.router.d_model = 16;
        c.d_ff = 8;
        c.kernels = MOE_KERNELS_C;
        if (!CHECK(moe_layer_create(&layer, &c, 1, 5, NULL, NULL) == MOE_OK, rows[i].preset)) continue;
        CHECK_STATUS(moe_layer_work_size(&layer, 24, 0, &bytes[0]), MOE_OK);
        CHECK_STATUS(moe_layer_work_size(&layer, 24, 1, &bytes[1]), MOE_OK);
        CHECKF(bytes[0] == rows[i].forward && bytes[1] == rows[i].training, "{\"%s\", %lu, %lu}", rows[i].preset,
               (unsigned long)bytes[0], (unsigned long)bytes[1]);
        moe_layer_free(&layer);
    }
}

int main(void) {
    CASE(test_reset());
    CASE(test_left_stages());
    CASE(test_later_settings());
    CASE(test_left_kinds());
    CASE(test_capacity_average());
    CASE(test_affinity_sum());
    CASE(test_draws());
    CASE(test_shared_l1());
    CASE(test_shared_l1_border());
    CASE(test_trainer_steps());
    CASE(test_raw_input());
    CASE(test_cutoffs());
    CASE(test_parity());
    CASE(test_competition());
    if (!MOE_REAL_IS_DOUBLE && sizeof(size_t) == 8) CASE(test_workspaces());
    return test_end();
}
