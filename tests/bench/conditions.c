/* A task of 8 operating conditions, each with a rule of its own: a mixture, one expert per input,
   against dense nets of equal products, bytes and cycles. tests/bench/conditions.sh runs it.
     cc -std=c99 -O1 -I. tests/bench/conditions.c -o conditions -lm
     ./conditions                                tests itself: fewer samples, two seeds
     ./conditions size FORM DEPTH WIDTH HEADER   writes an untrained net, to count its cycles
     ./conditions rows FOLDER SEEDS FIRST WIDTH...   trains; headers FOLDER/FORM_ROW_SEED.h; a line
            per net. WIDTH: those of equal cycles, of depth 1 to 3 in form 0, then in form 1

   The task: which of 4 discs of a shaft is out of balance. Conditions: 4 speeds (24, 40, 65, 100
   Hz) by 2 loads; the load stiffens the bearings, so that the 3 critical speeds (30, 55, 85 Hz)
   are 1.25 times as high. Disc c has the force u_c, at an angle that is not known; sensor i reads,
   in phase and in quadrature with the shaft,
     x_i = sum_m sin(m pi s_i) H_m sum_c sin(m pi d_c) u_c
     H_m = r^2 / (1 - r^2 + 2 i zeta r),  r = speed / critical speed m,  zeta = 0.08
   A mode inverts its phase at its critical speed: each condition has a rule of its own, which is
   not linear, as the angle is unknown. |u_c| is 0.5 to 1.5 for the disc in question; all discs have
   normal forces of 0.1 besides, and sensors normal noise of 0.05 of the range to which the
   amplifier is set for the speed. Places d and s (by 0.02) and critical speeds (by 3 %) are drawn
   with the seed: each is another machine. Inputs: 7 sensors in phase and in quadrature, the speed
   (it varies by 1 %), the load (noise 0.1). A condition lasts 50 samples.
   Forms: 0: these 16 inputs; 1: the condition one-hot besides, for all nets; 2, the null case: 16
   inputs, one condition (seed modulo 8).

   Budget: 4,000 samples to train, 4,000 held out. Every net, the mixture included, is trained with
   3 learning rates by 2 numbers of epochs in the worlds of seeds 1001 and 1002, and takes the pair
   with the best mean accuracy on what those hold out; then it is trained once with each seed that
   judges, and judged in int8 (primary outcome). What judges has chosen nothing.

   Claims, from the worlds of seeds 2001 and 2002, before the rows: with 8 conditions the mixture is
   better by 2 points or more than dense nets of equal products at any depth; a deep net of equal
   bytes is better by 0 to 3 points, for 5 times the bytes read and products. Of equal cycles
   nothing is claimed: at this size routing takes more cycles than the expert. With one condition
   the mixture wins nothing.

   Changed after rows were seen: equal cycles were first matched with 8-bit codes of hidden layers;
   trained nets mostly have 16-bit codes and took 1.6 to 1.8 times the mixture's cycles, so they are
   matched with those now. */

#ifdef DEVICE_MODEL /* the firmware: 20 inferences of random codes, linked with the library */
#define MOE_NO_FLOAT
#include DEVICE_MODEL

void device_begin(void);
void device_end(void);
void __attribute__((noinline, used)) device_begin(void) { __asm__ volatile("" ::: "memory"); }
void __attribute__((noinline, used)) device_end(void) { __asm__ volatile("" ::: "memory"); }

int main(void) {
    static int8_t input[NET_INPUTS];
    static int16_t output[NET_OUTPUTS];
    static unsigned char scratch[NET_SCRATCH];
    uint32_t seed = 1;
    for (int i = 0, failed; i < 20; i++) {
        for (int k = 0; k < NET_INPUTS; k++)
            input[k] = (int8_t)((int)((seed = seed * 1664525u + 1013904223u) >> 25) - 64);
        device_begin();
        failed = moe_infer(&net, NULL, input, output, scratch, sizeof scratch) != MOE_OK;
        device_end();
        if (failed) return 1;
    }
    return 0;
}
#else
#define MOE_IMPLEMENTATION
#include "moe.h"
#include "examples/extras/moe_export.h"
#include "examples/extras/moe_blocks.h"

#include "examples/statistics.h"
#include "tests/test.h"

#define PI 3.14159265358979
enum { SENSORS = 7, MODES = 3, CONDITIONS = 8, CLASSES = 4, INPUTS = 2 * SENSORS + 2, MOST = INPUTS + CONDITIONS };
enum {
    EXPERTS = 8,
    HIDDEN = 16 /* of an expert */,
    DEPTHS = 3,
    DWELL = 50,
    SAMPLES = 4000,
    WIDEST = 200 /* of depth 1 */
};
enum { VISIBLE, ONE_HOT, ALONE, FORMS }; /* forms of the task */
enum { PRODUCTS, BYTES, CYCLES, BUDGETS };
enum { NETS = 1 + BUDGETS * DEPTHS, RATES = 3, GRID = 2 * RATES, MOST_SEEDS = 100, TUNING = 1001, TUNED = 2 };

/* A net of the table and what was found of it. The sizes are sums over the seeds that judge. */
typedef struct row {
    int depth, width;                     /* depth 0: the mixture */
    double products, bytes, read, cached; /* read: constants that one inference reads, in bytes */
    double tuned[GRID];                   /* accuracies of the grid */
    int best;
    double floats[MOST_SEEDS], integers[MOST_SEEDS]; /* percent right */
} row;

static const moe_real rates[RATES] = {(moe_real)0.003, (moe_real)0.01, (moe_real)0.03};
static const char *const budgets[BUDGETS] = {"products", "bytes", "cycles"};
static int form, samples = SAMPLES, epochs = 30; /* and three times that */
static moe_real x[2 * SAMPLES * MOST];
static int32_t labels[2 * SAMPLES];
static moe_data train, test;

static int fail(const char *what, const char *why) {
    fprintf(stderr, "conditions: %s: %s\n", what, why);
    return 1;
}

/* ---- the task ---- */

static double normal(moe_rng *rng) { return (double)moe_rng_normal(rng); }

/* Places are from 0 to 1, critical speeds in Hz. */
typedef struct shaft {
    double disc[CLASSES], sensor[SENSORS], critical[MODES];
} shaft;

static void draw_shaft(shaft *s, moe_rng *rng) {
    static const double criticals[MODES] = {30, 55, 85};
    for (int i = 0; i < CLASSES; i++) s->disc[i] = (i + 1) / (CLASSES + 1.0) + 0.02 * normal(rng);
    for (int i = 0; i < SENSORS; i++) s->sensor[i] = (i + 1) / (SENSORS + 1.0) + 0.02 * normal(rng);
    for (int m = 0; m < MODES; m++) s->critical[m] = criticals[m] * (1 + 0.03 * normal(rng));
}

/* H_m, its real and imaginary part. */
static void respond(double r, double *h) {
    double real = 1 - r * r, imaginary = 2 * 0.08 * r;
    double factor = r * r / (real * real + imaginary * imaginary);
    h[0] = factor * real;
    h[1] = -factor * imaginary;
}

static double shape(int m, double place) { return sin((m + 1) * PI * place); }

static void draw_sample(moe_rng *rng, const shaft *s, int condition, int heavy, moe_real *to) {
    static const double speeds[] = {24, 40, 65, 100};
    double hz = speeds[condition % 4] * (1 + 0.01 * normal(rng)), loaded = condition / 4;
    double force[CLASSES][2], seen[SENSORS][2] = {{0}}, squares = 0;
    for (int c = 0; c < CLASSES; c++) {
        double mass = c == heavy ? 0.5 + (double)moe_rng_uniform(rng) : 0;
        double angle = 2 * PI * (double)moe_rng_uniform(rng);
        force[c][0] = mass * cos(angle) + 0.1 * normal(rng);
        force[c][1] = mass * sin(angle) + 0.1 * normal(rng);
    }
    for (int m = 0; m < MODES; m++) {
        double h[2], f[2] = {0, 0};
        respond(hz / (s->critical[m] * (1 + 0.25 * loaded)), h);
        for (int c = 0; c < CLASSES; c++)
            for (int k = 0; k < 2; k++) f[k] += shape(m, s->disc[c]) * force[c][k];
        squares += h[0] * h[0] + h[1] * h[1];
        for (int i = 0; i < SENSORS; i++) {
            seen[i][0] += shape(m, s->sensor[i]) * (h[0] * f[0] - h[1] * f[1]);
            seen[i][1] += shape(m, s->sensor[i]) * (h[0] * f[1] + h[1] * f[0]);
        }
    }
    for (int i = 0; i < 2 * SENSORS; i++) to[i] = (moe_real)(seen[i / 2][i % 2] / sqrt(squares) + 0.05 * normal(rng));
    to[2 * SENSORS] = (moe_real)(hz / 30);
    to[2 * SENSORS + 1] = (moe_real)(loaded + 0.1 * normal(rng));
}

static int inputs(void) { return form == ONE_HOT ? MOST : INPUTS; }

/* Means and deviations are those of the samples for training. */
static void standardize(int d) {
    for (int k = 0; k < INPUTS; k++) {
        double sum = 0, squares = 0, mean, deviation;
        for (int i = 0; i < samples; i++) {
            sum += (double)x[i * d + k];
            squares += (double)x[i * d + k] * (double)x[i * d + k];
        }
        mean = sum / samples;
        deviation = sqrt(squares / samples - mean * mean);
        for (int i = 0; i < 2 * samples; i++) x[i * d + k] = (moe_real)(((double)x[i * d + k] - mean) / deviation);
    }
}

static void draw_world(int seed) {
    int d = inputs(), condition = seed % CONDITIONS;
    shaft machine;
    moe_rng rng;
    moe_rng_seed(&rng, (uint64_t)seed);
    memset(x, 0, sizeof x);
    draw_shaft(&machine, &rng);
    for (int i = 0; i < 2 * samples; i++) {
        if (form != ALONE && i % DWELL == 0) condition = (int)moe_rng_below(&rng, CONDITIONS);
        labels[i] = (int32_t)moe_rng_below(&rng, CLASSES);
        draw_sample(&rng, &machine, condition, labels[i], x + i * d);
        if (form == ONE_HOT) x[i * d + INPUTS + condition] = 1;
    }
    standardize(d);
    train = (moe_data){.n = (size_t)samples, .x = x, .labels = labels};
    test = (moe_data){.n = (size_t)samples, .x = x + samples * d, .labels = labels + samples};
}

/* ---- the nets ---- */

static int epochs_of(int setting) { return setting < RATES ? epochs : 3 * epochs; }

static moe_status build(moe_net *net, const row *r, int seed, moe_error *error) {
    moe_layer_config mixture = {.expert = MOE_EXPERT_MLP, .d_ff = HIDDEN, .d_out = CLASSES};
    mixture.router.n_experts = EXPERTS;
    mixture.router.top_k = 1;
    mixture.router.weight = MOE_WEIGHT_RAW; /* else the router would have no gradient */
    mixture.router.router_bias = 1;
    mixture.router.loss_balance = (moe_real)0.05;
    moe_net_init(net, inputs(), 0, NULL);
    if (r->depth == 0) moe_net_mixture(net, &mixture);
    for (int i = 0; i < r->depth; i++) {
        moe_net_linear(net, r->width);
        moe_net_activation(net, MOE_ACT_RELU);
    }
    if (r->depth > 0) moe_net_linear(net, CLASSES);
    return moe_net_build(net, 1, (uint64_t)seed, error);
}

static moe_status write_model(void *built, moe_stream *stream) {
    return moe_export_c((const moe_built_model *)built, "net", stream, NULL);
}

static moe_status fetch(void *experts, size_t at, size_t size, void *to) {
    memcpy(to, ((const moe_buffer *)experts)->data + at, size);
    return MOE_OK;
}

/* The percentage of held-out samples that the integer model has right, negative: it failed. Experts
   come through a loader with a cache of one block, which counts their bytes. */
static double judge(moe_built_model *built, row *r) {
    const moe_model *model = &built->model;
    size_t block = model->n_mixtures > 0 ? model->mixtures[0].stride : 1, right = 0;
    void *memory = malloc(MOE_BLOCKS_MEMORY(1, block)), *scratch = malloc(model->scratch_size);
    moe_loader flash = {&built->experts, fetch}, cached;
    moe_blocks cache = {0};
    int failed = memory == NULL || scratch == NULL ||
                 moe_blocks_init(&cache, &flash, block, memory, MOE_BLOCKS_MEMORY(1, block));
    cached = moe_blocks_loader(&cache);
    for (size_t i = 0; i < test.n && !failed; i++) {
        int8_t input[MOST];
        int16_t output[CLASSES] = {0};
        int answer = 0;
        moe_infer_levels(model, test.x + i * model->d_in, input);
        failed = moe_infer(model, &cached, input, output, scratch, model->scratch_size) != MOE_OK;
        for (int c = 1; c < CLASSES; c++) answer = output[c] > output[answer] ? c : answer;
        right += answer == test.labels[i];
    }
    r->cached += (double)model->weights_size + (double)cache.bytes / (double)test.n;
    r->read += (double)model->weights_size + ((double)cache.bytes + (double)cache.hit_bytes) / (double)test.n;
    free(memory);
    free(scratch);
    return failed ? -1 : 100 * (double)right / (double)test.n;
}

/* The net as int8, as a header if that is not NULL, and judged if at is not negative: the number of
   the seed. */
static int convert(const moe_net *net, row *r, int at, const char *header) {
    moe_data some = {.n = at < 0 && header == NULL ? 1 : train.n, .x = train.x};
    moe_model_config config = {.weights = MOE_WEIGHTS_INT8, .calibration = &some};
    moe_built_model built = {0};
    moe_error error = {0};
    int failed = moe_model_create(&built, net, &config, &error) ||
                 (header != NULL && moe_file_replace(header, write_model, &built, &error));
    r->products += (double)built.model.multiplications;
    r->bytes += (double)(built.model.weights_size + built.model.experts_size);
    moe_model_free(&built);
    config.loader = 1;
    if (at >= 0 && !failed) {
        failed = moe_model_create(&built, net, &config, &error) || (r->integers[at] = judge(&built, r)) < 0;
        moe_model_free(&built);
    }
    return failed ? fail("an integer model", error.message) : 0;
}

/* Trains; the accuracy in float, and in int8 if at is not negative. */
static int run(row *r, int setting, int seed, int at, const char *header, double *accuracy) {
    moe_train_config training = {.batch = 32, .decay = (moe_real)0.02, .clip = 1, .final_rate = (moe_real)0.05};
    moe_net net = {0};
    moe_evaluation found = {0};
    moe_error error = {0};
    int failed;
    training.rate = rates[setting % RATES];
    training.epochs = epochs_of(setting);
    training.seed = (uint64_t)seed;
    failed = build(&net, r, seed, &error) || moe_fit(&net, &train, NULL, &training, &error) ||
             moe_evaluate(&net, &test, MOE_CRITERION_CROSS_ENTROPY, &found, &error);
    *accuracy = 100 * (double)found.accuracy;
    if (failed) fail("a net", error.message);
    else if (at >= 0) failed = convert(&net, r, at, header);
    moe_net_free(&net);
    return failed;
}

/* The sizes of a net that has learned nothing. It is calibrated on one sample: hidden layers have
   8-bit codes then. With outliers they have 16 bits, and the next product counts twice. */
static int size(row *r, const char *header) {
    moe_net net = {0};
    moe_error error = {0};
    int failed;
    r->products = r->bytes = 0;
    failed = build(&net, r, 1, &error) ? fail("a net", error.message) : convert(&net, r, -1, header);
    moe_net_free(&net);
    return failed;
}

/* The mixture, then by budget and depth the widest dense net that takes no more. */
static int choose_widths(row *rows, const int *cycles) {
    draw_world(TUNING);
    if (size(&rows[0], NULL)) return 1;
    for (int i = 1; i < NETS; i++) {
        int budget = (i - 1) / DEPTHS, depth = (i - 1) % DEPTHS;
        row next = {.depth = depth + 1, .width = budget == CYCLES ? cycles[depth] : 1};
        for (rows[i] = next; budget != CYCLES && next.width <= WIDEST / next.depth; next.width++) {
            if (size(&next, NULL)) return 1;
            if (budget == PRODUCTS ? next.products <= rows[0].products : next.bytes <= rows[0].bytes) rows[i] = next;
        }
    }
    return 0;
}

/* ---- the study ---- */

static int tune(row *rows) {
    for (int seed = TUNING; seed < TUNING + TUNED; seed++) {
        draw_world(seed);
        for (int i = 0; i < NETS * GRID; i++) {
            double accuracy;
            if (run(&rows[i / GRID], i % GRID, seed, -1, NULL, &accuracy)) return 1;
            rows[i / GRID].tuned[i % GRID] += accuracy / TUNED;
        }
    }
    for (int i = 0; i < NETS * GRID; i++) {
        row *r = &rows[i / GRID];
        if (r->tuned[i % GRID] > r->tuned[r->best]) r->best = i % GRID;
        r->products = r->bytes = 0;
    }
    return 0;
}

/* FORM ROW BUDGET DEPTH WIDTH; products, bytes, read, read with a cache; rate, epochs; accuracy in
   float and int8, what the net has more than the mixture, the 95 % interval of that. */
static void show(int i, const row *rows, int seeds) {
    const row *r = &rows[i];
    statistics_result more = statistics_paired((size_t)seeds, r->integers, rows[0].integers);
    printf("%d %d %s %d %d %.0f %.0f %.0f %.0f %g %d %.2f %.2f %+.2f %+.2f %+.2f\n", form, i,
           i == 0 ? "mixture" : budgets[(i - 1) / DEPTHS], r->depth, r->width, r->products / seeds, r->bytes / seeds,
           r->read / seeds, r->cached / seeds, (double)rates[r->best % RATES], epochs_of(r->best),
           statistics_paired((size_t)seeds, r->floats, NULL).mean,
           statistics_paired((size_t)seeds, r->integers, NULL).mean, more.mean, more.low, more.high);
    fflush(stdout);
}

static int study(const char *folder, int seeds, int first, const int *cycles, row *rows) {
    char header[1000];
    if (choose_widths(rows, cycles) || tune(rows)) return 1;
    for (int at = 0; at < seeds; at++) {
        draw_world(first + at);
        for (int i = 0; i < NETS; i++) {
            row *r = &rows[i];
            snprintf(header, sizeof header, "%s/%d_%d_%d.h", folder != NULL ? folder : "", form, i, at);
            if (run(r, r->best, first + at, at, folder != NULL ? header : NULL, &r->floats[at])) return 1;
        }
    }
    for (int i = 0; i < NETS; i++) show(i, rows, seeds);
    return 0;
}

/* ---- its own test: everything, with few samples ---- */

static void test_form(int which) {
    static row rows[NETS], wider[NETS];
    static const int cycles[DEPTHS] = {16, 10, 8};
    double accuracy;
    memset(rows, 0, sizeof rows);
    form = which;
    CHECK(choose_widths(rows, cycles) == 0);
    for (int i = 1; i <= BYTES * DEPTHS + DEPTHS; i++) {
        int bytes = (i - 1) / DEPTHS == BYTES;
        wider[i] = rows[i];
        wider[i].width++;
        CHECK(size(&wider[i], NULL) == 0);
        CHECKF(bytes ? rows[i].bytes <= rows[0].bytes : rows[i].products <= rows[0].products, "row %d", i);
        CHECKF(bytes ? wider[i].bytes > rows[0].bytes : wider[i].products > rows[0].products, "row %d", i);
    }
    memset(rows, 0, sizeof rows);
    CHECK(study(NULL, 2, 1, cycles, rows) == 0);
    for (int i = 0; i < NETS; i++) {
        const row *r = &rows[i];
        CHECKF(fabs(r->integers[0] - r->floats[0]) < 4, "row %d: %g, %g", i, r->integers[0], r->floats[0]);
        CHECK(i == 0 || (fabs(r->read - r->bytes) < 1 && fabs(r->cached - r->bytes) < 1), "a dense net reads it all");
    }
    CHECK(rows->cached < rows->read && rows->read < rows->bytes / 3, "the mixture reads one expert");
    CHECKF(which != ALONE || rows[4].integers[0] > 60, "of equal bytes: %g", rows[4].integers[0]);
    draw_world(1);
    CHECK(run(&rows[0], rows->best, 1, -1, NULL, &accuracy) == 0);
    CHECK(memcmp(&accuracy, &rows->floats[0], sizeof accuracy) == 0, "the same seed, the same bits");
}

static int test_all(void) {
    samples = 250;
    epochs = 2;
    CASE(test_form(VISIBLE));
    CASE(test_form(ONE_HOT));
    CASE(test_form(ALONE));
    return test_end();
}

int main(int count, char **words) {
    static row rows[FORMS][NETS], net;
    int n[10] = {0};
    for (int i = 2; i < count && i < 12; i++) n[i - 2] = atoi(words[i]);
    if (count == 1) return test_all();
    if (count == 6 && strcmp(words[1], "size") == 0) {
        form = n[0];
        net.depth = n[1];
        net.width = n[2];
        draw_world(TUNING);
        for (int k = 0; k < INPUTS; k++) x[k] *= 20; /* an outlier: cycles with 16-bit codes, as trained nets have */
        return size(&net, words[5]);
    }
    if (count != 11 || strcmp(words[1], "rows") != 0 || n[1] < 2 || n[1] > MOST_SEEDS)
        return fail("arguments", "size FORM DEPTH WIDTH HEADER, or rows FOLDER SEEDS FIRST WIDTH... (six)");
    for (form = 0; form < FORMS; form++)
        if (study(words[2], n[1], n[2], n + 3 + (form == ONE_HOT ? DEPTHS : 0), rows[form])) return 1;
    return 0;
}
#endif
