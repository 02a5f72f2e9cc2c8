/* texts.h - the bench's runs on natural text: byte or word models of language.h. Include it after
   worlds.h. A tenth of the training text in 20 stretches is held out: the grid is tuned on it, and
   choices are compared on it. The test text is evaluated once, at the end of a judged run. A
   stopped run leaves a checkpoint beside the rows and resumes from it bit for bit. */
#ifndef BENCH_TEXTS_H
#define BENCH_TEXTS_H

#include "../language.h"

enum {
    TEXT_LAYERS = 4,
    TEXT_CONTEXT = 128,
    TEXT_PARTS = 20,
    TEXT_HELD = 64,
    TEXT_BLOCKS = 32,
    TEXT_BLOCK = 16,
    TEXT_VOCABULARY = 4096,
    TEXT_SAVE_EVERY = 500,
    TEXT_FIRST_LATE = 2
};
#define TEXT_SWAPPED 0.025 /* share of the tokens that an attack replaces */

typedef struct text_sample {
    int32_t *ids, *labels; /* [sequences * TEXT_CONTEXT] */
    size_t sequences;
} text_sample;

static struct text_data {
    struct language language;
    moe_buffer bytes, kept; /* what the words point into */
    language_text train;
    text_sample held, test, attacked;
    int ids; /* ids are 0..ids-1, the last of which occurs in no text */
    uint64_t checksum;
} text_data[2]; /* bytes, words */

static const char *text_checkpoints = "."; /* the folder of checkpoints */
static const char *text_program = "";      /* of this program: another build starts its runs anew */

static uint64_t texts_checksum(int words) { return text_data[words].checksum; }

static moe_status text_take(const language_text *text, size_t most, text_sample *out, moe_error *error) {
    out->ids = (int32_t *)malloc(most * TEXT_CONTEXT * sizeof *out->ids);
    out->labels = (int32_t *)malloc(most * TEXT_CONTEXT * sizeof *out->labels);
    if (out->ids == NULL || out->labels == NULL) return language_no_memory(error);
    out->sequences = language_spread(text, most, TEXT_CONTEXT, out->ids, out->labels);
    if (out->sequences >= TEXT_BLOCKS) return MOE_OK;
    return language_error(error, MOE_ERR_ARGUMENT, "%d sequences of text are too few", (int)out->sequences);
}

/* A copy of the test sample in which tokens, as inputs and as targets, are replaced by an unseen
   one; the same in every run. */
static moe_status text_attack(struct text_data *d, moe_error *error) {
    size_t n = d->test.sequences * TEXT_CONTEXT;
    text_sample *a = &d->attacked;
    moe_rng rng;
    moe_rng_seed(&rng, 1);
    a->sequences = d->test.sequences;
    a->ids = (int32_t *)malloc(n * sizeof *a->ids);
    a->labels = (int32_t *)malloc(n * sizeof *a->labels);
    if (a->ids == NULL || a->labels == NULL) return language_no_memory(error);
    for (size_t i = 0; i < n; i++) {
        int first = i % TEXT_CONTEXT == 0, swapped = (double)moe_rng_uniform(&rng) < TEXT_SWAPPED;
        a->ids[i] = first ? d->test.ids[i] : a->labels[i - 1];
        a->labels[i] = swapped ? d->ids - 1 : d->test.labels[i];
    }
    return MOE_OK;
}

static uint64_t text_hash(uint64_t hash, const language_text *t) {
    for (size_t i = 0; i < t->n; i++) hash = (hash ^ (uint64_t)t->ids[i]) * 1099511628211u;
    return hash;
}

static moe_status text_load(struct text_data *d, int words, const char *train, const char *test, moe_error *error) {
    moe_buffer held = {0}, judged = {0};
    language_text of_held = {0}, of_test = {0};
    moe_status status = language_read(&train, 1, &d->bytes, error);
    if (status == MOE_OK) status = language_read(&test, 1, &judged, error);
    if (status == MOE_OK) status = language_split(&d->bytes, TEXT_PARTS, 0.1, &d->kept, &held, error);
    if (status == MOE_OK) status = language_learn(&d->language, &d->kept, words, TEXT_VOCABULARY, error);
    if (status == MOE_OK) status = language_encode(&d->language, &d->kept, &d->train, error);
    if (status == MOE_OK) status = language_encode(&d->language, &held, &of_held, error);
    if (status == MOE_OK) status = language_encode(&d->language, &judged, &of_test, error);
    d->ids = d->language.size + 1;
    if (status == MOE_OK) status = text_take(&of_held, TEXT_HELD, &d->held, error);
    if (status == MOE_OK) status = text_take(&of_test, TEXT_BLOCKS * TEXT_BLOCK, &d->test, error);
    if (status == MOE_OK) status = text_attack(d, error);
    if (status == MOE_OK)
        d->checksum = text_hash(text_hash(text_hash(14695981039346656037u, &d->train), &of_held), &of_test);
    free(of_held.ids);
    free(of_test.ids);
    moe_buffer_free(&held);
    moe_buffer_free(&judged);
    return status;
}

/* Reads the texts once; 1 after an error message. */
static int texts_read(int words, const char *train, const char *test) {
    moe_error error;
    if (text_data[words].checksum != 0) return 0;
    if (train == NULL || test == NULL) {
        fputs("bench: text needs --text FILE and --test FILE, such as WikiText's validation and test articles\n",
              stderr);
        return 1;
    }
    if (text_load(&text_data[words], words, train, test, &error) == MOE_OK) return 0;
    fprintf(stderr, "bench: %s and %s: %s\n", train, test, error.message);
    return 1;
}

static void texts_free(void) {
    for (int i = 0; i < 2; i++) {
        struct text_data *d = &text_data[i];
        text_sample *samples[] = {&d->held, &d->test, &d->attacked};
        for (int k = 0; k < 3; k++) {
            free(samples[k]->ids);
            free(samples[k]->labels);
        }
        free(d->language.word);
        free(d->train.ids);
        moe_buffer_free(&d->bytes);
        moe_buffer_free(&d->kept);
        memset(d, 0, sizeof *d);
    }
}

/* ---- a network ---- */

/* The arm of a layer. */
static const arm *text_arm(const job *j, int layer) {
    static const arm plain = {"smoe", "smoe", "router_bias=1 loss_balance=@balance", "", "x", 0, 0};
    static const arm dense = {"dense", "", "", "", "x", 0, 0};
    size_t last = strlen(j->a->where) - 1;
    char letter = j->a->where[(size_t)layer < last ? (size_t)layer : last];
    return letter == 'x' ? j->a : letter == 'd' ? &dense : &plain;
}

static moe_status text_build(const job *j, const struct text_data *d, moe_net *net, moe_error *error) {
    language_shape shape = {d->ids, j->w->d, TEXT_LAYERS};
    moe_layer_config experts[TEXT_LAYERS];
    moe_status status = MOE_OK;
    for (int l = 0; l < TEXT_LAYERS && status == MOE_OK; l++) {
        job of_layer = *j;
        of_layer.a = text_arm(j, l);
        status = arm_configure(&of_layer, 0, &experts[l], error);
    }
    return status == MOE_OK ? language_net(net, &shape, experts, (uint64_t)j->seed, error) : status;
}

/* ---- reading a sample ---- */

typedef struct text_reading {
    const moe_net *net;
    const text_sample *set;
    size_t vocabulary;
    double *losses;              /* [sequences] mean per token */
    int32_t *first[TEXT_LAYERS]; /* [tokens] first choices, or NULL */
    moe_metrics *metrics[TEXT_LAYERS];
    double rows, routed; /* token-expert assignments computed; tokens times layers with a router */
} text_reading;

static moe_status text_read_pass(void *ctx, const moe_net_pass *pass, size_t from) {
    text_reading *r = (text_reading *)ctx;
    moe_status status = MOE_OK;
    for (size_t t = 0; t < pass->n_tokens; t++)
        r->losses[(from + t) / TEXT_CONTEXT] +=
            language_loss(r->vocabulary, pass->y + t * r->vocabulary, r->set->labels[from + t]) / TEXT_CONTEXT;
    for (size_t l = 0; l < TEXT_LAYERS && status == MOE_OK; l++) {
        const moe_routing *routing = moe_net_routing(r->net, pass, language_module(l));
        if (routing == NULL) continue;
        r->rows += (double)routing->plan.offsets[routing->n_experts];
        r->routed += (double)pass->n_tokens;
        if (r->first[l] != NULL) status = moe_routing_choices(routing, 1, 1, r->first[l] + from);
        if (r->metrics[l] != NULL && status == MOE_OK) status = moe_metrics_add(r->metrics[l], routing, NULL, NULL);
    }
    return status;
}

/* The mean loss; r->losses [sequences] receives that of each sequence. Calls are as large as a
   training step. */
static moe_status text_read(text_reading *r, const job *j, double *loss, moe_error *error) {
    size_t together = (size_t)j->w->batch / TEXT_CONTEXT;
    moe_status status;
    memset(r->losses, 0, r->set->sequences * sizeof *r->losses);
    status = language_run(r->net, r->set->ids, r->set->sequences, TEXT_CONTEXT, together, text_read_pass, r, error);
    *loss = statistics_paired(r->set->sequences, r->losses, NULL).mean;
    return status;
}

static moe_status text_loss(const moe_net *net, const job *j, const text_sample *set, double *losses, double *rows,
                            double *loss, moe_error *error) {
    text_reading r = {0};
    moe_status status;
    r.net = net;
    r.set = set;
    r.vocabulary = (size_t)net->d_out;
    r.losses = losses;
    status = text_read(&r, j, loss, error);
    if (rows != NULL) *rows = r.routed > 0 ? r.rows / r.routed : MISSING;
    return status;
}

/* First choices of every layer on the held-out text; routed: 1 for layers with a router. */
typedef struct text_choices {
    int32_t first[TEXT_LAYERS][TEXT_HELD * TEXT_CONTEXT];
    int routed[TEXT_LAYERS];
} text_choices;

static moe_status text_look(const moe_net *net, const job *j, const struct text_data *d, text_choices *c, found *f,
                            moe_error *error) {
    double losses[TEXT_HELD], loss = 0, n = 0;
    moe_metrics metrics[TEXT_LAYERS];
    void *memory[TEXT_LAYERS] = {NULL};
    text_reading r = {0};
    moe_status status = MOE_OK;
    r.net = net;
    r.set = &d->held;
    r.vocabulary = (size_t)net->d_out;
    r.losses = losses;
    for (size_t l = 0; l < TEXT_LAYERS && status == MOE_OK; l++) {
        const moe_module *m = &net->modules[language_module(l)];
        size_t bytes, experts = (size_t)m->layer.config.router.n_experts;
        c->routed[l] = m->kind == MOE_MODULE_MIXTURE;
        if (!c->routed[l]) continue;
        r.first[l] = c->first[l];
        if ((status = moe_metrics_size(experts, 0, &bytes)) != MOE_OK) break;
        if ((memory[l] = malloc(bytes)) == NULL) status = MOE_ERR_MEMORY;
        else status = moe_metrics_init(&metrics[l], experts, 0, memory[l], bytes);
        r.metrics[l] = &metrics[l];
    }
    if (status == MOE_OK) status = text_read(&r, j, &loss, error);
    if (f != NULL) f->value[ENTROPY] = f->value[LOAD_ENTROPY] = f->value[LOAD_MAX] = 0;
    for (size_t l = 0; l < TEXT_LAYERS && f != NULL; l++) n += c->routed[l];
    for (size_t l = 0; l < TEXT_LAYERS && status == MOE_OK && f != NULL; l++) {
        moe_report report;
        if (!c->routed[l] || (status = moe_metrics_report(&metrics[l], &report)) != MOE_OK) continue;
        f->value[ENTROPY] += report.confidence_entropy / n;
        f->value[LOAD_ENTROPY] += report.load_entropy / n;
        f->value[LOAD_MAX] += report.load_max_over_mean / (double)report.n_experts / n;
        found_add(f, "entropy", report.confidence_entropy);
    }
    for (int l = 0; l < TEXT_LAYERS; l++) free(memory[l]);
    return status;
}

/* Measures two sets of choices: fluctuation from `before` to `now`, instability of `now` between
   adjacent layers from the third on, where adaptive clustering acts. */
static moe_status text_compare(const moe_net *net, const text_choices *before, const text_choices *now, size_t n,
                               found *f) {
    moe_status status = MOE_OK;
    double sum = 0, layers = 0;
    double unstable = 0, pairs = 0;
    for (size_t l = 0; l < TEXT_LAYERS && status == MOE_OK; l++) {
        double share = 0;
        if (!now->routed[l]) continue;
        status = moe_fluctuation(n, before->first[l], now->first[l], NULL, &share);
        found_add(f, "fluctuation", share);
        sum += share;
        layers++;
        if (l <= TEXT_FIRST_LATE || !now->routed[l - 1]) continue;
        {
            size_t e1 = (size_t)net->modules[language_module(l - 1)].layer.config.router.n_experts;
            size_t e2 = (size_t)net->modules[language_module(l)].layer.config.router.n_experts;
            double *scratch = (double *)malloc((e1 + 1) * (e2 + 1) * sizeof *scratch);
            moe_instability_report between;
            if (scratch == NULL) return MOE_ERR_MEMORY;
            status = moe_instability(n, now->first[l - 1], e1, now->first[l], e2, NULL, scratch, &between);
            unstable += between.instability / between.chance;
            pairs++;
            free(scratch);
        }
    }
    if (layers > 0) f->value[FLUCTUATION] = sum / layers;
    if (pairs > 0) f->value[INSTABILITY] = unstable / pairs;
    return status;
}

/* ---- a run ---- */

/* The path of a file of this run, beside the rows. Its name depends on text and build. */
static void text_path(const job *j, const char *ending, char *path, size_t room) {
    uint64_t stamp = texts_checksum(j->w->strength > 0);
    for (const char *s = text_program; *s != '\0'; s++) stamp = (stamp ^ (unsigned char)*s) * 1099511628211u;
    snprintf(path, room, "%s/%s-%s-%d-%g-%g-%d-%016llx.%s", text_checkpoints, j->w->name, j->a->name, j->seed, j->rate,
             j->balance, job_steps(j), (unsigned long long)stamp, ending);
}

static moe_status text_write_lists(void *ctx, moe_stream *stream) {
    const found *f = (const found *)ctx;
    return stream->write(stream->ctx, f->lists, strlen(f->lists));
}

/* Saves the curve, then the checkpoint: a curve that is ahead of its checkpoint is cut when read.
   */
static moe_status text_save(const job *j, moe_trainer *t, const double *totals, found *f, moe_error *error) {
    char path[1200];
    moe_status status;
    text_path(j, "curve", path, sizeof path);
    if ((status = moe_file_replace(path, text_write_lists, f, error)) != MOE_OK) return status;
    memcpy(t->position, totals, 2 * sizeof *totals);
    text_path(j, "checkpoint", path, sizeof path);
    return moe_trainer_save(t, path, error);
}

/* Resumes from a checkpoint, if there is one. */
static void text_resume(const job *j, moe_trainer *t, double *totals, found *f) {
    char path[1200];
    moe_buffer lists = {0};
    size_t points, n = 0;
    text_path(j, "checkpoint", path, sizeof path);
    if (moe_trainer_load(t, path, NULL) != MOE_OK) return;
    memcpy(totals, t->position, 2 * sizeof *totals);
    points = (size_t)t->steps * WORLD_TIMES / (size_t)job_steps(j);
    text_path(j, "curve", path, sizeof path);
    if (points == 0 || moe_file_read(path, &lists, NULL) != MOE_OK) return;
    for (size_t i = 0; i < lists.size && i + 1 < LIST_ROOM; i++) {
        n += lists.data[i] == ':';
        if (n == points) break;
        f->lists[i] = (char)lists.data[i];
        f->lists[i + 1] = '\0';
    }
    moe_buffer_free(&lists);
}

static void text_clean(const job *j) {
    static const char *const endings[] = {"checkpoint", "curve", "epoch"};
    char path[1200];
    for (int i = 0; i < 3; i++) {
        text_path(j, endings[i], path, sizeof path);
        remove(path);
    }
}

/* Batches depend only on seed and step, so all arms see the same ones, resumed or not. */
static void text_batch(const job *j, const struct text_data *d, int step, int32_t *ids) {
    moe_rng rng;
    moe_rng_seed(&rng, ((uint64_t)j->seed << 32) + (uint64_t)step);
    language_draw(&d->train, (size_t)j->w->batch / TEXT_CONTEXT, TEXT_CONTEXT, &rng, ids, ids + j->w->batch);
}

static moe_status text_train(const job *j, const struct text_data *d, moe_net *net, found *f, moe_error *error) {
    moe_train_config config = run_training(j, MOE_CRITERION_CROSS_ENTROPY, NULL);
    int steps = job_steps(j), pass = (int)(d->train.n / (size_t)j->w->batch); /* steps of a pass over the text */
    int mark = steps > pass ? steps - pass : steps / 2;
    double totals[2] = {0, 0}, losses[TEXT_HELD], loss = 0; /* late loss, seconds */
    int32_t *ids = (int32_t *)malloc(2 * (size_t)j->w->batch * sizeof *ids);
    moe_trainer trainer = {0};
    moe_status status = ids != NULL ? moe_trainer_init(&trainer, net, &config, error) : language_no_memory(error);
    char path[1200];
    if (status == MOE_OK) text_resume(j, &trainer, totals, f);
    if (status == MOE_OK && (int)trainer.steps == steps) /* stopped after its last step */
        status = text_loss(net, j, &d->held, losses, NULL, &f->value[LOSS], error);
    for (int i = (int)trainer.steps + 1; i <= steps && status == MOE_OK; i++) {
        moe_data data = {0};
        moe_step step;
        clock_t start = clock();
        text_batch(j, d, i, ids);
        data.n = (size_t)j->w->batch;
        data.token_ids = ids;
        data.labels = ids + j->w->batch;
        data.length = TEXT_CONTEXT;
        if ((status = moe_trainer_step(&trainer, &data, &step, error)) != MOE_OK) break;
        totals[1] += world_seconds(start);
        if (i > steps - steps / 10) totals[0] += (double)step.loss / (steps / 10);
        if (i * WORLD_TIMES / steps != (i - 1) * WORLD_TIMES / steps) {
            status = text_loss(net, j, &d->held, losses, NULL, &loss, error);
            found_add(f, "curve", loss);
            f->value[LOSS] = loss;
        }
        if (i == mark && !j->tuning && status == MOE_OK) {
            text_path(j, "epoch", path, sizeof path);
            status = moe_net_save(net, path, error);
        }
        if (status == MOE_OK && (i % TEXT_SAVE_EVERY == 0 || bench_stopped))
            status = text_save(j, &trainer, totals, f, error);
        if (status == MOE_OK && bench_stopped) status = MOE_ERR_STOPPED;
    }
    f->value[TRAIN] = totals[0];
    f->value[MS] = 1000 * totals[1] / steps;
    free(ids);
    moe_trainer_free(&trainer);
    return status;
}

/* Measures the trained network: on the test text by blocks, attacked, and its routing. */
static moe_status text_judge(const job *j, const struct text_data *d, const moe_net *net, found *f, moe_error *error) {
    static text_choices before, now;
    double losses[TEXT_BLOCKS * TEXT_BLOCK], loss = 0;
    size_t used;
    char path[1200];
    moe_net earlier = {0};
    moe_status status = text_loss(net, j, &d->attacked, losses, NULL, &loss, error);
    f->value[ATTACKED] = loss;
    if (status == MOE_OK) status = text_loss(net, j, &d->test, losses, &f->value[ROWS], &loss, error);
    f->value[LOSS] = loss;
    for (size_t b = 0; b < TEXT_BLOCKS && status == MOE_OK; b++) {
        size_t from = b * d->test.sequences / TEXT_BLOCKS, to = (b + 1) * d->test.sequences / TEXT_BLOCKS;
        found_add(f, "blocks", statistics_paired(to - from, losses + from, NULL).mean);
    }
    (void)moe_net_parameter_count(net, &used);
    f->value[ACTIVE] = (double)used;
    text_path(j, "epoch", path, sizeof path);
    if (status == MOE_OK) status = moe_net_load(&earlier, path, 0, MOE_KERNELS_AUTO, NULL, error);
    if (status == MOE_OK) status = text_look(&earlier, j, d, &before, NULL, error);
    if (status == MOE_OK) status = text_look(net, j, d, &now, f, error);
    if (status == MOE_OK) status = text_compare(net, &before, &now, d->held.sequences * TEXT_CONTEXT, f);
    moe_net_free(&earlier);
    return status;
}

static moe_status run_text(const job *j, found *f, moe_error *error) {
    const struct text_data *d = &text_data[j->w->strength > 0];
    moe_net net = {0};
    moe_status status = text_build(j, d, &net, error);
    if (status == MOE_OK) status = text_train(j, d, &net, f, error);
    if (status == MOE_OK && !j->tuning) status = text_judge(j, d, &net, f, error);
    moe_net_free(&net);
    if (status == MOE_OK || status == MOE_ERR_NONFINITE) text_clean(j);
    return status;
}

#endif
