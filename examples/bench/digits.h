/* digits.h - the bench's runs on handwritten digits. Include it after worlds.h.

   The seed sets the order: the first fifth is for judging, the second for tuning the grid, the rest
   for training. All seeds share the digits, so true intervals are somewhat wider.
     DIGITS   small complete classifiers, mixed by a gate; the loss is -ln sum p_e softmax(o_e).
              With where = pairs, halves or random an expert first learns its share of the digits
              alone and is frozen: classes {0,1}, {2,3}, ...; {0-4} or {5-9}; every fifth digit
     PATCHES  a transformer reads an image as 16 patches; its second MoE layer is the arm's. A call
              is one image, so what a router computes over the call is about one image's patches.
              The attack is FGSM with 1/16 of a pixel's range, by the gradient without router
              losses */
#ifndef BENCH_DIGITS_H
#define BENCH_DIGITS_H

enum { DIGIT_PIXELS = 64, DIGIT_MOST = 2000, DIGIT_CLASSES = 10, PATCH_TOKENS = 16, PATCH_WIDTH = 32 };
#define FGSM_BUDGET 0.0625

static struct {
    moe_real x[DIGIT_MOST * DIGIT_PIXELS];
    int32_t label[DIGIT_MOST];
    size_t n;
    uint64_t checksum;
} digits;

static uint64_t digits_checksum(void) { return digits.checksum; }

/* Reads the digits of the repository once; 1 after an error message. */
static int digits_read(void) {
    const char *path = example_file("data/digits.csv");
    FILE *f = digits.n == 0 ? fopen(path, "rb") : NULL;
    int value, failed = f == NULL && digits.n == 0;
    digits.checksum = 14695981039346656037u;
    for (size_t i = 0; f != NULL && fscanf(f, "%d%*[,\n\r]", &value) == 1; i++) {
        size_t digit = i / (DIGIT_PIXELS + 1), column = i % (DIGIT_PIXELS + 1);
        if (digit >= DIGIT_MOST || value < 0 || value > 16) failed = 1;
        if (failed) break;
        if (column < DIGIT_PIXELS) digits.x[digit * DIGIT_PIXELS + column] = (moe_real)value / 16;
        else digits.label[digit] = value;
        digits.n = digit + (column == DIGIT_PIXELS);
    }
    for (size_t i = 0; i < digits.n * DIGIT_PIXELS; i++)
        digits.checksum = (digits.checksum ^ (uint64_t)(digits.x[i] * 16)) * 1099511628211u;
    if (f != NULL) fclose(f);
    if (failed || digits.n < 100) fprintf(stderr, "bench: %s: cannot be read\n", path);
    return failed || digits.n < 100;
}

/* The digits in the seed's order: [0, n/5) judged, [n/5, 2n/5) held out, the rest trained on. */
static void digit_order(int seed, size_t *order) {
    moe_rng rng;
    moe_rng_seed(&rng, (uint64_t)seed + 7000);
    for (size_t i = 0; i < digits.n; i++) {
        size_t place = (size_t)moe_rng_below(&rng, i + 1);
        order[i] = order[place];
        order[place] = i;
    }
}

/* ---- mixtures of small classifiers ---- */

/* Whether expert e learns from a digit. */
static int digit_taught(const char *where, size_t place, int32_t label, int e) {
    if (strcmp(where, "pairs") == 0) return label / 2 == e;
    if (strcmp(where, "halves") == 0) return label / 5 == e % 2;
    return (int)(place % 5) == e;
}

/* Trains on digits drawn from the training part, only on those of expert e unless e < 0. */
static moe_status digit_train(run_state *s, const size_t *order, int e, double *ms, moe_error *error) {
    const world *w = s->j->w;
    moe_real x[32 * DIGIT_PIXELS];
    int32_t label[32];
    moe_param_group group = {"*experts.*[0]", (moe_real)s->j->a->fast, 0, 0};
    moe_train_config training = run_training(s->j, s->criterion, &group);
    moe_trainer trainer = {0};
    moe_rng rng;
    clock_t start = clock();
    size_t from = 2 * digits.n / 5;
    moe_status status = moe_trainer_init(&trainer, &s->net, &training, error);
    moe_rng_seed(&rng, ~(uint64_t)s->j->seed);
    for (int i = 0; i < job_steps(s->j) && status == MOE_OK; i++) {
        moe_data data = {0};
        for (size_t k = 0; k < (size_t)w->batch;) {
            size_t place = from + (size_t)moe_rng_below(&rng, digits.n - from), digit = order[place];
            if (e >= 0 && !digit_taught(s->j->a->where, place, digits.label[digit], e)) continue;
            memcpy(x + k * DIGIT_PIXELS, digits.x + digit * DIGIT_PIXELS, DIGIT_PIXELS * sizeof *x);
            label[k++] = digits.label[digit];
        }
        data.n = (size_t)w->batch;
        data.x = x;
        data.labels = label;
        status = moe_trainer_step(&trainer, &data, NULL, error);
        if (bench_stopped) status = MOE_ERR_STOPPED;
    }
    *ms = 1000 * world_seconds(start) / job_steps(s->j);
    moe_trainer_free(&trainer);
    return status;
}

/* Each expert learns its share of the digits alone and is frozen. */
static moe_status digit_pretrain(run_state *s, const size_t *order, moe_error *error) {
    static const arm lonely = {"", "importance_gate", "loss_importance=0 untrained=1", "", "x", 0, 0};
    moe_status status = MOE_OK;
    for (int e = 0; e < s->j->w->experts && status == MOE_OK; e++) {
        run_state alone = {0};
        world w = *s->j->w;
        arm a = lonely;
        job j = *s->j;
        double ms;
        w.experts = 1;
        a.where = s->j->a->where;
        j.w = &w;
        j.a = &a;
        j.seed = s->j->seed * 1000 + e;
        status = run_build(&alone, &j, 0, DIGIT_CLASSES, error);
        if (status == MOE_OK) status = digit_train(&alone, order, e, &ms, error);
        for (size_t i = 0; i < s->net.n_tensors && status == MOE_OK; i++) {
            moe_tensor *to = &s->net.tensors[i], from;
            if (strstr(to->name, "experts.") == NULL || moe_net_find(&alone.net, to->name, &from) != MOE_OK) continue;
            memcpy(to->data + (size_t)e * from.count, from.data, from.count * sizeof *to->data);
            to->flags |= MOE_PARAM_FROZEN;
        }
        run_free(&alone);
    }
    return status;
}

/* The judged or held-out digits: error, I(E;Y) with Y the mixture's answer, and load. */
static moe_status digit_measure(run_state *s, const moe_data *data, found *f, moe_error *error) {
    const moe_layer *layer = &s->net.modules[s->module].layer;
    size_t n = data->n, experts = (size_t)s->j->w->experts, bytes, room, used;
    moe_real *answer = (moe_real *)malloc(n * DIGIT_CLASSES * sizeof *answer);
    int32_t *answers = (int32_t *)malloc(n * sizeof *answers);
    moe_evaluation result;
    moe_layer_pass pass;
    moe_mixture mixture = {0};
    moe_metrics metrics;
    moe_report report;
    moe_call call = {0};
    void *work = NULL, *memory = NULL;
    moe_status status = moe_evaluate(&s->net, data, s->criterion, &result, error);
    if (status == MOE_OK) status = moe_layer_work_size(layer, n, 1, &bytes);
    if (status == MOE_OK) status = moe_metrics_size(experts, DIGIT_CLASSES, &room);
    if (status == MOE_OK &&
        (answer == NULL || answers == NULL || (work = malloc(bytes)) == NULL || (memory = malloc(room)) == NULL))
        status = MOE_ERR_MEMORY;
    call.n_tokens = n;
    call.x = data->x;
    call.keep = 1;
    if (status == MOE_OK) status = moe_layer_forward(layer, &call, answer, work, bytes, &pass);
    if (status == MOE_OK) {
        mixture.n = n;
        mixture.experts = experts;
        mixture.width = DIGIT_CLASSES;
        mixture.p = pass.routing.weights;
        mixture.outputs = pass.expert_outputs;
        status = moe_mixture_answer(s->criterion, &mixture, NULL, answer, error);
        for (size_t i = 0; i < n; i++) moe_top_k(DIGIT_CLASSES, answer + i * DIGIT_CLASSES, 1, &answers[i]);
    }
    if (status == MOE_OK) status = moe_metrics_init(&metrics, experts, DIGIT_CLASSES, memory, room);
    if (status == MOE_OK) status = moe_metrics_add(&metrics, &pass.routing, NULL, answers);
    if (status == MOE_OK) status = moe_metrics_report(&metrics, &report);
    if (status == MOE_OK) {
        f->value[LOSS] = (double)result.loss;
        f->value[ERROR] = 1 - (double)result.accuracy;
        f->value[INFORMATION] = report.information_first - report.information_first_chance;
        f->value[ENTROPY] = report.gate_entropy;
        f->value[LOAD_ENTROPY] = report.usage_entropy;
        f->value[LOAD_MAX] = report.first_share_max;
        f->value[FAST_SHARE] = report.first[0] / (double)n;
        (void)moe_net_parameter_count(&s->net, &used);
        f->value[ACTIVE] = (double)used;
    }
    free(memory);
    free(work);
    free(answers);
    free(answer);
    return status;
}

static moe_status digit_mixture(const job *j, const size_t *order, found *f, moe_error *error) {
    static moe_real x[DIGIT_MOST * DIGIT_PIXELS];
    static int32_t label[DIGIT_MOST];
    run_state s = {0};
    moe_data data = {0};
    size_t from = j->tuning ? digits.n / 5 : 0;
    moe_status status = run_build(&s, j, 0, DIGIT_CLASSES, error);
    data.n = digits.n / 5;
    data.x = x;
    data.labels = label;
    for (size_t i = 0; i < data.n; i++) {
        memcpy(x + i * DIGIT_PIXELS, digits.x + order[from + i] * DIGIT_PIXELS, DIGIT_PIXELS * sizeof *x);
        label[i] = digits.label[order[from + i]];
    }
    if (status == MOE_OK && j->a->where[1] != '\0') status = digit_pretrain(&s, order, error);
    if (status == MOE_OK) status = digit_train(&s, order, -1, &f->value[MS], error);
    if (status == MOE_OK) status = digit_measure(&s, &data, f, error);
    run_free(&s);
    return status;
}

/* ---- images as patches ---- */

/* Balance 0 leaves router losses out, so that gradients are those of the criterion. */
static moe_status patch_build(const job *j, double balance, moe_net *net, moe_error *error) {
    job of_layer = *j;
    moe_layer_config c, first;
    moe_attention_config attention = {0};
    moe_status status;
    of_layer.balance = balance;
    status = arm_configure(&of_layer, 0, &c, error);
    if (status == MOE_OK) status = moe_layer_preset("smoe", &first, error);
    if (status != MOE_OK) return status;
    first.router.n_experts = j->w->experts;
    first.router.loss_balance = (moe_real)balance;
    first.d_ff = c.d_ff = j->w->d_ff;
    attention.full = 1;
    moe_net_init(net, j->w->d, MOE_KERNELS_AUTO, NULL);
    moe_net_linear(net, PATCH_WIDTH);
    moe_net_positions(net, PATCH_TOKENS);
    for (int l = 0; l < 2; l++) {
        moe_net_rms_norm(net);
        moe_net_attention(net, &attention);
        moe_net_residual(net, 2);
        moe_net_rms_norm(net);
        moe_net_mixture(net, l == 0 ? &first : &c);
        moe_net_residual(net, 2);
    }
    moe_net_rms_norm(net);
    moe_net_linear(net, DIGIT_CLASSES);
    return moe_net_build(net, 1, (uint64_t)j->seed, error);
}

/* Patch p has the pixels of row 2 (p / 4) and the next, column 2 (p % 4) and the next. The last
   patch has the label. */
static void patch_image(size_t digit, moe_real *x, int32_t *labels) {
    for (size_t i = 0; i < DIGIT_PIXELS; i++) {
        size_t p = i / 4, row = 2 * (p / 4) + i % 4 / 2;
        size_t column = 2 * (p % 4) + i % 2;
        x[i] = digits.x[digit * DIGIT_PIXELS + row * 8 + column];
    }
    for (size_t p = 0; p < PATCH_TOKENS; p++) labels[p] = p + 1 == PATCH_TOKENS ? digits.label[digit] : -1;
}

static moe_status patch_train(const job *j, moe_net *net, const size_t *order, found *f, moe_error *error) {
    moe_train_config training = run_training(j, MOE_CRITERION_CROSS_ENTROPY, NULL);
    moe_real x[DIGIT_PIXELS];
    int32_t labels[PATCH_TOKENS];
    moe_trainer trainer = {0};
    moe_rng rng;
    clock_t start = clock();
    size_t from = 2 * digits.n / 5;
    moe_status status;
    training.batch = PATCH_TOKENS;
    status = moe_trainer_init(&trainer, net, &training, error);
    moe_rng_seed(&rng, ~(uint64_t)j->seed);
    for (int i = 0; i < job_steps(j) && status == MOE_OK; i++) {
        for (int k = 0; k < j->w->batch / PATCH_TOKENS && status == MOE_OK; k++) {
            moe_data data = {0};
            patch_image(order[from + (size_t)moe_rng_below(&rng, digits.n - from)], x, labels);
            data.n = data.length = PATCH_TOKENS;
            data.x = x;
            data.labels = labels;
            status = moe_trainer_accumulate(&trainer, &data, NULL, error);
        }
        if (status == MOE_OK) status = moe_trainer_update(&trainer, NULL, error);
        if (bench_stopped) status = MOE_ERR_STOPPED;
    }
    f->value[MS] = 1000 * world_seconds(start) / job_steps(j);
    moe_trainer_free(&trainer);
    return status;
}

/* Loss and error of the judged or held-out images, as they are and attacked. */
static moe_status patch_measure(const job *j, moe_net *net, const size_t *order, found *f, moe_error *error) {
    size_t n = digits.n / 5, from = j->tuning ? n : 0, bytes, used;
    double loss = 0, wrong = 0;
    double attacked = 0;
    void *work = NULL;
    moe_status status = moe_net_work_size(net, PATCH_TOKENS, 1, &bytes);
    if (status == MOE_OK && (work = malloc(bytes)) == NULL) status = MOE_ERR_MEMORY;
    for (size_t i = 0; i < n && status == MOE_OK; i++)
        for (int attack = 0; attack < 2 && status == MOE_OK; attack++) {
            static moe_real x[DIGIT_PIXELS];
            moe_real dy[PATCH_TOKENS * DIGIT_CLASSES], dx[DIGIT_PIXELS] = {0};
            int32_t labels[PATCH_TOKENS], answer;
            moe_call call = {0};
            moe_net_pass pass;
            if (!attack) patch_image(order[from + i], x, labels); /* else x as attacked */
            else labels[PATCH_TOKENS - 1] = digits.label[order[from + i]];
            call.n_tokens = PATCH_TOKENS;
            call.x = x;
            call.training = !attack;
            call.error = error;
            if ((status = moe_net_forward(net, &call, work, bytes, &pass)) != MOE_OK) break;
            moe_top_k(DIGIT_CLASSES, pass.y + (PATCH_TOKENS - 1) * DIGIT_CLASSES, 1, &answer);
            *(attack ? &attacked : &wrong) += (answer != labels[PATCH_TOKENS - 1]) / (double)n;
            if (attack) continue;
            loss += (double)moe_cross_entropy(PATCH_TOKENS, DIGIT_CLASSES, pass.y, labels, dy) / (double)n;
            status = moe_net_backward(net, dy, dx, &pass);
            for (size_t k = 0; k < DIGIT_PIXELS; k++) {
                moe_real moved = x[k] + (moe_real)FGSM_BUDGET * (moe_real)((dx[k] > 0) - (dx[k] < 0));
                x[k] = moved < 0 ? 0 : moved > 1 ? 1 : moved;
            }
        }
    f->value[LOSS] = loss;
    f->value[ERROR] = wrong;
    f->value[ATTACKED] = attacked;
    (void)moe_net_parameter_count(net, &used);
    f->value[ACTIVE] = (double)used;
    free(work);
    return status;
}

static moe_status patch_run(const job *j, const size_t *order, found *f, moe_error *error) {
    moe_net net = {0}, judged = {0};
    moe_status status = patch_build(j, j->balance, &net, error);
    if (status == MOE_OK) status = patch_train(j, &net, order, f, error);
    if (status == MOE_OK) status = patch_build(j, 0, &judged, error);
    if (status == MOE_OK) {
        take_tensors(&judged, &net);
        status = patch_measure(j, &judged, order, f, error);
    }
    moe_net_free(&net);
    moe_net_free(&judged);
    return status;
}

static moe_status run_digits(const job *j, found *f, moe_error *error) {
    static size_t order[DIGIT_MOST];
    digit_order(j->seed, order);
    return j->w->kind == PATCHES ? patch_run(j, order, f, error) : digit_mixture(j, order, f, error);
}

#endif
