/* The functions called by examples/web/page.html: points in the plane, an MoE network that learns
   their classes, and its routing everywhere. examples/web/run compiles it to WebAssembly and embeds
   it in the page. Other compilers accept it, too: cc -std=c99 -O2 -I. -c examples/web/web.c

   The page keeps no state of the network: it sets the settings, calls, and reads the arrays whose
   addresses it queries. Calls that can fail return a moe_status; web_error then gives the library's
   message. */
#define MOE_NO_STDIO
#define MOE_NO_QUANT
#define MOE_IMPLEMENTATION
#include "moe.h"

#include <math.h>

#ifdef __wasm__
#define WEB(type, name) __attribute__((export_name(#name))) type name
#else
#define WEB(type, name) type name
#endif

/* The plane is [-1,1] x [-1,1]. The network reads (2x, 2y, 1); the 1 gives linear functions of the
   input an offset. */
enum {
    MAX_POINTS = 4000, CLASSES = 4, EXPERTS = 16, D_IN = 3, BATCH = 64, SIDE = 192, CELLS = SIDE * SIDE, CALL = 256,
    SCATTER = 6151
};
enum {
    STEPS, MEAN_LOSS, ACCURACY, H_B, H_E, INFORMATION, INFORMATION_MOST, PER_POINT, DROPPED, PARAMETERS, USED, TRAITS,
    LOADS, SHARES = LOADS + EXPERTS, NUMBERS = SHARES + EXPERTS
}; /* the page uses this order */

typedef struct web_settings {
    int preset;       /* row of moe_presets */
    int experts;      /* up to EXPERTS */
    int top_k;        /* 0: the preset's */
    int width;        /* of the features and of the experts' hidden layer */
    int features;     /* 1: a layer of learned features comes before the router; 0: the router sees the input */
    int expert;       /* -1: the preset's, else MOE_EXPERT_ */
    moe_real balance; /* factor of the balance loss; negative: the preset's */
    moe_real rate;
    uint64_t seed;
} web_settings;

/* A network in training. */
typedef struct web_model {
    web_settings made; /* the settings of net */
    moe_net net;
    /* net as it was when the map was started: a map takes many calls, between which net continues
       to learn */
    moe_net shown;
    moe_trainer trainer;
    moe_rng order; /* the order of points */
    int mixture;   /* the MoE layer's index in the network */
    void *work;    /* for CALL points */
    size_t work_size;
} web_model;

static web_settings settings;
static web_model model;
static int ready; /* 1: there is a model */
static moe_error error;
static float points[MAX_POINTS * 2];    /* x, y; y upwards */
static int32_t labels[MAX_POINTS];      /* 0 .. CLASSES-1 */
static unsigned char right[MAX_POINTS]; /* 1: the network predicts that point's class */
static double numbers[NUMBERS];
/* rows from the top */
static unsigned char map_first[CELLS], map_class[CELLS], map_sure[CELLS], map_share[CELLS * EXPERTS];
static double metrics_memory[2048];

/* ---- what the page reads ---- */

WEB(const char *, web_version)(void) { return moe_version(); }
WEB(const char *, web_kernels)(void) { return moe_kernels_select(MOE_KERNELS_AUTO)->name; }
WEB(const char *, web_error)(void) { return error.message; }
WEB(float *, web_points)(void) { return points; }
WEB(int32_t *, web_labels)(void) { return labels; }
WEB(unsigned char *, web_right)(void) { return right; }
WEB(double *, web_numbers)(void) { return numbers; }
WEB(unsigned char *, web_map_first)(void) { return map_first; }
WEB(unsigned char *, web_map_class)(void) { return map_class; }
WEB(unsigned char *, web_map_sure)(void) { return map_sure; }
WEB(unsigned char *, web_map_share)(void) { return map_share; }
WEB(int, web_most_points)(void) { return MAX_POINTS; }
WEB(int, web_side)(void) { return SIDE; }

WEB(int, web_presets)(void) {
    int n = 0;
    while (moe_presets()[n].name != NULL) n++;
    return n;
}

/* what: 0 name, 1 source, 2 formula, 3 settings of the router, 4 of the layer. */
WEB(const char *, web_preset)(int i, int what) {
    const moe_preset *preset = &moe_presets()[i];
    switch (what) {
    case 0: return preset->name;
    case 1: return preset->source;
    case 2: return preset->formula;
    case 3: return preset->router;
    default: return preset->layer;
    }
}

/* The name of one bit of numbers[TRAITS], NULL past the last. */
WEB(const char *, web_trait)(int bit) { return moe_trait_name(1u << bit); }

/* ---- example points ---- */

static void put(int i, double px, double py, int label) {
    points[2 * i] = (float)(px < -0.98 ? -0.98 : px > 0.98 ? 0.98 : px);
    points[2 * i + 1] = (float)(py < -0.98 ? -0.98 : py > 0.98 ? 0.98 : py);
    labels[i] = label;
}

/* Fills the first n points, classes in turn. kind: 0 blobs, 1 moons, 2 spirals, 3 checkerboard, 4
   rings. */
WEB(int, web_data)(int kind, int n, int seed) {
    static const double at[CLASSES][2] = {{-0.5, 0.45}, {0.5, 0.5}, {0.45, -0.5}, {-0.45, -0.5}};
    const double pi = 3.14159265358979323846;
    moe_rng rng;
    int i;
    if (n > MAX_POINTS) n = MAX_POINTS;
    moe_rng_seed(&rng, (uint64_t)seed + 1000u * (uint64_t)kind);
    for (i = 0; i < n; i++) {
        const double u = (double)moe_rng_uniform(&rng), v = (double)moe_rng_uniform(&rng);
        const double a = (double)moe_rng_normal(&rng), b = (double)moe_rng_normal(&rng);
        if (kind == 0) put(i, at[i % CLASSES][0] + 0.13 * a, at[i % CLASSES][1] + 0.13 * b, i % CLASSES);
        else if (kind == 1 && i % 2 == 0)
            put(i, -0.25 + 0.55 * cos(pi * u) + 0.05 * a, -0.15 + 0.65 * sin(pi * u) + 0.05 * b, 0);
        else if (kind == 1) put(i, 0.25 - 0.55 * cos(pi * u) + 0.05 * a, 0.15 - 0.65 * sin(pi * u) + 0.05 * b, 1);
        else if (kind == 2) {
            const double r = 0.1 + 0.8 * sqrt(u), turn = 3.5 * pi * sqrt(u) + pi * (i % 2);
            put(i, r * cos(turn) + 0.02 * a, r * sin(turn) + 0.02 * b, i % 2);
        } else if (kind == 3) put(i, 1.8 * u - 0.9, 1.8 * v - 0.9, ((int)(4 * u) + (int)(4 * v)) % 2);
        else
            put(i, (0.12 + 0.3 * (i % 3)) * cos(2 * pi * u) + 0.04 * a,
                (0.12 + 0.3 * (i % 3)) * sin(2 * pi * u) + 0.04 * b, i % 3);
    }
    return n;
}

/* ---- the network ---- */

WEB(void, web_set)
(int preset, int experts, int top_k, int width, int features, int expert, double balance, double rate, int seed) {
    settings.preset = preset;
    settings.experts = experts;
    settings.top_k = top_k;
    settings.width = width;
    settings.features = features;
    settings.expert = expert;
    settings.balance = (moe_real)balance;
    settings.rate = (moe_real)rate;
    settings.seed = (uint64_t)seed;
}

static void free_model(web_model *m) {
    moe_trainer_free(&m->trainer);
    moe_net_free(&m->net);
    moe_net_free(&m->shown);
    free(m->work);
    m->work = NULL;
}

static moe_status configure(moe_layer_config *config) {
    moe_status status = moe_layer_preset(moe_presets()[settings.preset].name, config, &error);
    config->router.n_experts = settings.experts;
    config->router.n_zero = config->router.n_zero > 0;
    config->router.n_copy = config->router.n_copy > 0;
    config->router.n_constant = config->router.n_constant > 0;
    if (config->router.bias_real > 1) config->router.bias_real = 1;
    if (settings.top_k > 0) config->router.top_k = settings.top_k;
    if (settings.balance >= 0) config->router.loss_balance = settings.balance;
    if (settings.expert >= 0) {
        config->expert = settings.expert;
        config->no_expert_bias = 0;
    }
    config->d_ff = settings.width;
    config->d_out = config->add_input && !settings.features ? D_IN : settings.width;
    return status;
}

/* features: input -> linear, gelu -> MoE layer -> linear -> classes; else without the first two. */
static moe_status build_net(moe_net *net, const moe_layer_config *config, int trainable) {
    moe_net_init(net, D_IN, MOE_KERNELS_AUTO, NULL);
    if (settings.features) moe_net_linear(net, settings.width);
    if (settings.features) moe_net_activation(net, MOE_ACT_GELU);
    moe_net_mixture(net, config);
    moe_net_linear(net, CLASSES);
    return moe_net_build(net, trainable, settings.seed, &error);
}

static moe_status build(web_model *m) {
    moe_layer_config config;
    moe_train_config training;
    moe_status status = configure(&config);
    if (status != MOE_OK) return status;
    m->made = settings;
    m->mixture = settings.features ? 2 : 0;
    memset(&training, 0, sizeof training);
    status = build_net(&m->net, &config, 1);
    if (status == MOE_OK) status = build_net(&m->shown, &config, 0);
    training.batch = BATCH;
    training.rate = settings.rate;
    training.clip = 1;
    training.seed = settings.seed + 1;
    if (status == MOE_OK) status = moe_trainer_init(&m->trainer, &m->net, &training, &error);
    if (status == MOE_OK) status = moe_net_work_size(&m->net, CALL, 0, &m->work_size);
    if (status != MOE_OK) return status;
    m->work = malloc(m->work_size);
    moe_rng_seed(&m->order, settings.seed + 2);
    return m->work != NULL ? MOE_OK : MOE_ERR_MEMORY;
}

static void say(moe_status status) {
    const char *text = moe_status_text(status);
    size_t i = 0;
    for (; text[i] != '\0' && i + 1 < sizeof error.message; i++) error.message[i] = text[i];
    error.message[i] = '\0';
}

/* Reports the status of calls without a moe_error. */
static moe_status told(moe_status status) {
    if (status != MOE_OK && error.message[0] == '\0') say(status);
    return status;
}

static void input(moe_real *x, double px, double py) {
    x[0] = (moe_real)(2 * px);
    x[1] = (moe_real)(2 * py);
    x[2] = 1;
}

/* One step on BATCH points of the first n, drawn with replacement. */
static moe_status step(web_model *m, int n) {
    moe_real x[BATCH * D_IN];
    int32_t label[BATCH];
    moe_data data;
    int i;
    memset(&data, 0, sizeof data);
    for (i = 0; i < BATCH; i++) {
        const size_t from = (size_t)moe_rng_below(&m->order, (uint64_t)n);
        input(x + i * D_IN, (double)points[2 * from], (double)points[2 * from + 1]);
        label[i] = labels[from];
    }
    data.n = BATCH;
    data.x = x;
    data.labels = label;
    return moe_trainer_step(&m->trainer, &data, NULL, &error);
}

static moe_status forward(web_model *m, const moe_net *net, const moe_real *x, int n, moe_net_pass *pass) {
    moe_call call;
    moe_rng rng;
    moe_rng_seed(&rng, m->made.seed + 3);
    memset(&call, 0, sizeof call);
    call.n_tokens = (size_t)n;
    call.x = x;
    call.rng = &rng;
    return moe_net_forward(net, &call, m->work, m->work_size, pass);
}

/* Whether a network with these settings can be created, trained and run: tries one step and one
   call on a few points, then frees it. */
WEB(int, web_try)(void) {
    static const float corner[4] = {-0.5f, 0.5f, 0.25f, -0.75f};
    float kept[8];
    int32_t kept_labels[4];
    web_model m;
    moe_real x[4 * D_IN];
    moe_net_pass pass;
    moe_status status;
    int i;
    memset(&m, 0, sizeof m);
    memcpy(kept, points, sizeof kept);
    memcpy(kept_labels, labels, sizeof kept_labels);
    error.message[0] = '\0';
    for (i = 0; i < 4; i++) {
        points[2 * i] = corner[i];
        points[2 * i + 1] = corner[3 - i];
        labels[i] = i;
        input(x + i * D_IN, (double)corner[i], (double)corner[3 - i]);
    }
    status = build(&m);
    if (status == MOE_OK) status = step(&m, 4);
    if (status == MOE_OK) status = forward(&m, &m.net, x, 4, &pass);
    free_model(&m);
    memcpy(points, kept, sizeof kept);
    memcpy(labels, kept_labels, sizeof kept_labels);
    return (int)told(status);
}

/* Creates a new network from the settings. On failure the old one is kept, but not its numbers. */
WEB(int, web_create)(void) {
    web_model made;
    moe_status status;
    size_t used;
    memset(&made, 0, sizeof made);
    error.message[0] = '\0';
    memset(numbers, 0, sizeof numbers);
    status = build(&made);
    if (status != MOE_OK) {
        free_model(&made);
        return (int)told(status);
    }
    free_model(&model);
    model = made;
    ready = 1;
    model.trainer.net = &model.net;
    numbers[PARAMETERS] = (double)moe_net_parameter_count(&model.net, &used);
    numbers[USED] = (double)used;
    numbers[TRAITS] = (double)moe_router_traits(&model.net.modules[model.mixture].layer.config.router);
    return MOE_OK;
}

/* Sets the learning rate of the following steps. */
WEB(void, web_rate)(double rate) {
    settings.rate = (moe_real)rate;
    if (ready) model.trainer.rate = model.made.rate = settings.rate;
}

/* Trains count steps on the first n points; stops at the first that fails. */
WEB(int, web_train)(int n, int count) {
    moe_status status = ready && n > 0 ? MOE_OK : MOE_ERR_STATE;
    error.message[0] = '\0';
    while (status == MOE_OK && count-- > 0) {
        status = step(&model, n);
        numbers[STEPS] = (double)model.trainer.steps;
    }
    return (int)told(status);
}

/* ---- measurements and the map ---- */

/* The class with the largest logit among those that occur; *sure receives its probability among
   them. */
static int answer(const moe_real *y, const unsigned char *present, double *sure) {
    double sum = 0;
    int best = -1, c;
    for (c = 0; c < CLASSES; c++)
        if (present[c] && (best < 0 || y[c] > y[best])) best = c;
    for (c = 0; c < CLASSES; c++)
        if (present[c]) sum += exp((double)y[c] - (double)y[best]);
    *sure = best < 0 ? 0 : 1 / sum;
    return best < 0 ? 0 : best;
}

static void find_classes(int n, unsigned char *present) {
    memset(present, 0, CLASSES);
    while (n-- > 0) present[labels[n]] = 1;
}

/* H of v, scaled to sum 1. */
static double entropy(size_t n, const double *v) {
    double sum = 0, h = 0;
    size_t i;
    for (i = 0; i < n; i++) sum += v[i] > 0 ? v[i] : 0;
    for (i = 0; i < n; i++) h -= v[i] > 0 ? v[i] / sum * log(v[i] / sum) : 0;
    return h;
}

/* Gate values are scaled to sum 1 for both entropies, so that they lie in 0 .. ln E for every gate.
   If all experts work on all points, as with soft routers, the load is the share of the weights. */
static void keep_report(const moe_report *r, const double *weights) {
    double sum = 0;
    size_t e;
    numbers[H_B] = r->confidence_entropy;
    numbers[H_E] = entropy(r->n_experts, r->mean_gate);
    numbers[INFORMATION] = r->information;
    numbers[PER_POINT] = r->experts_per_token;
    numbers[DROPPED] = r->dropped_share;
    for (e = 0; e < r->n_experts; e++) sum += weights[e];
    for (e = 0; e < r->n_experts; e++) {
        numbers[SHARES + e] = sum > 0 ? weights[e] / sum : 0;
        numbers[LOADS + e] = r->n_assignments > 0 ? r->load[e] / r->n_assignments : numbers[SHARES + e];
    }
}

static void add_weights(double *weights, const moe_routing *routing) {
    const size_t count = routing->n_tokens * routing->n_experts;
    size_t i;
    for (i = 0; i < count; i++) weights[i % routing->n_experts] += fabs((double)routing->weights[i]);
}

/* Accuracy, loss and metrics on the first n points, into numbers and right. */
WEB(int, web_measure)(int n) {
    moe_real x[CALL * D_IN];
    unsigned char present[CLASSES];
    moe_metrics metrics;
    moe_report report;
    moe_net_pass pass;
    moe_status status = ready && n > 0 ? MOE_OK : MOE_ERR_STATE;
    double loss = 0, correct = 0, sure;
    double weights[EXPERTS] = {0}, of_class[CLASSES] = {0};
    int at, i, count;
    error.message[0] = '\0';
    find_classes(n, present);
    if (status == MOE_OK)
        status = moe_metrics_init(&metrics, (size_t)model.made.experts, CLASSES, metrics_memory, sizeof metrics_memory);
    for (at = 0; at < n && status == MOE_OK; at += count) {
        count = n - at < CALL ? n - at : CALL;
        for (i = 0; i < count; i++) input(x + i * D_IN, (double)points[2 * (at + i)], (double)points[2 * (at + i) + 1]);
        status = forward(&model, &model.net, x, count, &pass);
        if (status == MOE_OK)
            status =
                moe_metrics_add(&metrics, moe_net_routing(&model.net, &pass, (size_t)model.mixture), NULL, labels + at);
        if (status != MOE_OK) break;
        add_weights(weights, moe_net_routing(&model.net, &pass, (size_t)model.mixture));
        loss += count * (double)moe_cross_entropy((size_t)count, CLASSES, pass.y, labels + at, NULL);
        for (i = 0; i < count; i++) {
            right[at + i] = answer(pass.y + i * CLASSES, present, &sure) == labels[at + i];
            correct += right[at + i];
            of_class[labels[at + i]]++;
        }
    }
    if (status == MOE_OK) status = moe_metrics_report(&metrics, &report);
    if (status != MOE_OK) return (int)told(status);
    numbers[MEAN_LOSS] = loss / n;
    numbers[ACCURACY] = correct / n;
    numbers[INFORMATION_MOST] = entropy(CLASSES, of_class);
    keep_report(&report, weights);
    return MOE_OK;
}

/* Stores a cell of the map from token t of a routing: shares of the weights; first choice, 255:
   none. */
static void keep_cell(int cell, const moe_routing *routing, size_t t) {
    const size_t e_count = routing->n_experts;
    const moe_real *weights = routing->weights + t * e_count;
    double sum = 0;
    int first = routing->n_choices[t] > 0 ? (int)routing->choices[t * routing->max_choices] : -1;
    size_t e;
    for (e = 0; e < e_count; e++) {
        if (weights[e] > 0) sum += (double)weights[e];
        if (routing->n_choices[t] == 0 && weights[e] > (first < 0 ? 0 : weights[first])) first = (int)e;
    }
    for (e = 0; e < EXPERTS; e++) /* 0 is for experts that do not work there */
        map_share[cell * EXPERTS + (int)e] =
            (unsigned char)(e < e_count && weights[e] > 0 ? 1 + 254 * (double)weights[e] / sum : 0);
    map_first[cell] = (unsigned char)(first < 0 ? 255 : first);
}

static void copy_values(const moe_net *from, moe_net *to) {
    size_t i;
    for (i = 0; i < from->n_tensors; i++)
        memcpy(to->tensors[i].data, from->tensors[i].data, from->tensors[i].count * sizeof(moe_real));
}

/* Cells from..from+CALL-1 of the map of the network as it was in the call with from = 0, in an
   order that spreads every call over the whole plane: with some routers a point's result depends on
   the others in the call. n: number of points, whose classes occur. */
WEB(int, web_map)(int from, int n) {
    moe_real x[CALL * D_IN];
    unsigned char present[CLASSES];
    moe_net_pass pass;
    moe_status status = ready ? MOE_OK : MOE_ERR_STATE;
    double sure;
    int i;
    error.message[0] = '\0';
    find_classes(n, present);
    if (status == MOE_OK && from == 0) copy_values(&model.net, &model.shown);
    for (i = 0; i < CALL; i++) {
        const int cell = (from + i) * SCATTER % CELLS;
        input(x + i * D_IN, (2 * (cell % SIDE) + 1) / (double)SIDE - 1, 1 - (2 * (cell / SIDE) + 1) / (double)SIDE);
    }
    if (status == MOE_OK) status = forward(&model, &model.shown, x, CALL, &pass);
    for (i = 0; i < CALL && status == MOE_OK; i++) {
        const int cell = (from + i) * SCATTER % CELLS;
        keep_cell(cell, moe_net_routing(&model.shown, &pass, (size_t)model.mixture), (size_t)i);
        map_class[cell] = (unsigned char)answer(pass.y + i * CLASSES, present, &sure);
        map_sure[cell] = (unsigned char)(255 * sure);
    }
    return (int)told(status);
}
