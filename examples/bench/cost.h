/* cost.h - claims on loss in planted worlds at equal cost: the router whose step costs more is
   trained again for proportionally fewer steps, with a complete schedule, and judged on the same
   seeds. Cost is counted FLOPs, or time measured by bench --time. Part of bench.c. */
#ifndef BENCH_COST_H
#define BENCH_COST_H

enum { BY_FLOPS, BY_TIME, N_COSTS, TIME_ROUNDS = 41, TIME_STEPS = 40, TIME_EDGE = 13, MAX_TIMES = 64 };

static int is_on_cost(const claim *c) {
    return c->outcome == LOG_LOSS && strcmp(find_world(c->world)->part, "worlds") == 0;
}

/* ---- FLOPs ---- */

/* FLOPs of a training step per token: 6 per parameter that it uses, with the mean number of experts
   that tokens reached, plus three times those of refinement with the tokens of a sequence. */
static double flops_of(const world *w, const arm *a) {
    run_state s = {0};
    job j;
    double work[MAX_SEEDS], flops = MISSING;
    moe_error error;
    int n = values_of(w, a->name, WORK, work);
    if (n < seeds_of(w) || !tuned(w, a, 0, &j)) return MISSING;
    if (run_build(&s, &j, 0, world_outputs(w), &error) == MOE_OK) {
        const moe_layer *layer = &s.net.modules[s.module].layer;
        const moe_router_config *c = &layer->config.router;
        int chosen = c->top_k > 0 ? c->top_k : c->n_experts;
        int real = c->n_experts - c->n_zero - c->n_copy - c->n_constant;
        double of_experts = 0, pairs = 0;
        size_t used;
        moe_tensor t;
        for (size_t i = 0; moe_layer_tensor(layer, i, &t) == MOE_OK; i++)
            if (strncmp(t.name, "experts.", 8) == 0) of_experts += (double)t.count;
        if (c->refine == MOE_REFINE_SIMILARITY) pairs = w->d + c->n_experts;
        if (c->refine == MOE_REFINE_ATTENTION) pairs = c->n_experts;
        (void)moe_net_parameter_count(&s.net, &used);
        flops = 6 * ((double)used + (statistics_paired((size_t)n, work, NULL).mean - chosen) * of_experts / real);
        flops += 3 * 2 * WORLD_LENGTH * pairs;
    }
    run_free(&s);
    return flops;
}

/* ---- time ---- */

/* A line of time.csv: the arm's time per step divided by the baseline's, with its 95 % interval. */
static struct timed_pair {
    char world[24], arm[32], baseline[32];
    double ratio, low, high;
} times[MAX_TIMES];
static int n_times;

#define TIME_COLUMNS "world,arm,baseline,ratio,low,high,rounds,steps,version,commit,build,compiler,kernels,threads\n"

static int read_times(void) {
    char line[400];
    FILE *f = fopen(path_of("time"), "rb");
    int good;
    n_times = 0;
    if (f == NULL) return 0;
    good = fgets(line, sizeof line, f) != NULL && strcmp(line, TIME_COLUMNS) == 0;
    while (good && n_times < MAX_TIMES && fgets(line, sizeof line, f) != NULL) {
        struct timed_pair *t = &times[n_times++];
        good = sscanf(line, "%23[^,],%31[^,],%31[^,],%lf,%lf,%lf,", t->world, t->arm, t->baseline, &t->ratio, &t->low,
                      &t->high) == 6;
    }
    fclose(f);
    return good ? 0 : complain(path_of("time"), "is not a file of times");
}

static const struct timed_pair *find_time(const claim *c) {
    for (int i = 0; i < n_times; i++)
        if (strcmp(times[i].world, c->world) == 0 && strcmp(times[i].arm, c->arm) == 0 &&
            strcmp(times[i].baseline, c->baseline) == 0)
            return &times[i];
    return NULL;
}

/* One of the two networks that are trained alternately. */
typedef struct timed {
    job j;
    run_state s;
    moe_trainer trainer;
    moe_train_config training;
    moe_rng rng;
} timed;

static moe_status timed_begin(timed *t, const planted *p, moe_error *error) {
    moe_status status = run_build(&t->s, &t->j, 0, p->outputs, error);
    t->training = run_training(&t->j, t->s.criterion, NULL);
    moe_rng_seed(&t->rng, 1);
    return status == MOE_OK ? moe_trainer_init(&t->trainer, &t->s.net, &t->training, error) : status;
}

/* Processor seconds of some steps. */
static moe_status timed_steps(timed *t, const planted *p, double *seconds, moe_error *error) {
    static tokens batch;
    int32_t offsets[WORLD_TOKENS / WORLD_LENGTH + 1];
    moe_status status = MOE_OK;
    *seconds = 0;
    for (int i = 0; i < TIME_STEPS && status == MOE_OK; i++) {
        moe_data data;
        moe_call call;
        clock_t start;
        planted_draw(p, &t->rng, (size_t)t->j.w->batch, 2, &batch);
        call = run_call(&t->s, &batch, offsets);
        data = run_data(&batch, &call);
        start = clock();
        status = moe_trainer_step(&t->trainer, &data, NULL, error);
        *seconds += world_seconds(start);
    }
    return status;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Alternates between both, so that other load affects both; ratio [3]: median and interval. */
static moe_status time_pair(const claim *c, double *ratio, moe_error *error) {
    static planted p;
    const world *w = find_world(c->world);
    timed pair[2];
    double ratios[TIME_ROUNDS], took[2];
    moe_rng rng;
    moe_status status = MOE_OK;
    memset(pair, 0, sizeof pair);
    moe_rng_seed(&rng, 1);
    planted_create(&p, w, &rng);
    for (int i = 0; i < 2 && status == MOE_OK; i++) {
        if (!tuned(w, find_arm(i == 0 ? c->arm : c->baseline), 0, &pair[i].j)) status = MOE_ERR_STATE;
        else status = timed_begin(&pair[i], &p, error);
    }
    for (int r = -2; r < TIME_ROUNDS && status == MOE_OK; r++) { /* the first two warm up */
        for (int i = 0; i < 2 && status == MOE_OK; i++)
            status = timed_steps(&pair[i ^ (r & 1)], &p, &took[i ^ (r & 1)], error);
        if (r >= 0) ratios[r] = took[0] / took[1];
        if (status == MOE_OK && bench_stopped) status = MOE_ERR_STOPPED;
    }
    for (int i = 0; i < 2; i++) {
        moe_trainer_free(&pair[i].trainer);
        run_free(&pair[i].s);
    }
    if (status != MOE_OK) return status;
    qsort(ratios, TIME_ROUNDS, sizeof *ratios, by_size);
    ratio[0] = ratios[TIME_ROUNDS / 2];
    ratio[1] = ratios[TIME_EDGE];
    ratio[2] = ratios[TIME_ROUNDS - 1 - TIME_EDGE];
    return status;
}

/* --time: times the two routers of every claim on loss and then replaces time.csv. */
static int do_times(void) {
    moe_error error = {MOE_OK, ""};
    int failed = read_rows(0);
    printed = (moe_buffer){0};
    printer = moe_buffer_stream(&printed);
    print("%s", TIME_COLUMNS);
    for (int c = 0; c < N_CLAIMS && !failed; c++) {
        double ratio[3];
        moe_status status;
        if (!is_on_cost(&claims[c])) continue;
        if ((status = time_pair(&claims[c], ratio, &error)) != MOE_OK) {
            failed = complain(claims[c].id, status == MOE_ERR_STATE     ? "its rows are missing"
                                            : status == MOE_ERR_STOPPED ? "stopped"
                                                                        : error.message);
            break;
        }
        printf("%s: a step of %s takes %.3f [%.3f, %.3f] times as long as one of %s\n", claims[c].world, claims[c].arm,
               ratio[0], ratio[1], ratio[2], claims[c].baseline);
        print("%s,%s,%s,%.4f,%.4f,%.4f,%d,%d,%d.%d.%d,%s,%s\n", claims[c].world, claims[c].arm,
                claims[c].baseline, ratio[0], ratio[1], ratio[2], TIME_ROUNDS, TIME_STEPS, MOE_VERSION_MAJOR,
                MOE_VERSION_MINOR, MOE_VERSION_PATCH, BENCH_TEXT(BENCH_COMMIT), this_build("worlds"));
    }
    if (!failed && moe_file_replace(path_of("time"), write_buffer, &printed, &error) != MOE_OK)
        failed = complain(path_of("time"), error.message);
    moe_buffer_free(&printed);
    return failed;
}

/* ---- verdicts ---- */

/* The cost of a step of the arm divided by that of its baseline; NaN: unknown. */
static double cost_ratio(const claim *c, int by) {
    const world *w = find_world(c->world);
    const struct timed_pair *t = find_time(c);
    if (by == BY_TIME) return t != NULL ? t->ratio : MISSING;
    return flops_of(w, find_arm(c->arm)) / flops_of(w, find_arm(c->baseline));
}

/* The reduced number of steps of the side whose step costs more; *of_arm: 1 if it is the arm. 0:
   the costs are within 1 %. */
static int fewer_steps(const claim *c, double ratio, int *of_arm) {
    *of_arm = ratio > 1;
    if (!(fabs(log(ratio)) >= 0.01)) return 0;
    return (int)(find_world(c->world)->steps / (*of_arm ? ratio : 1 / ratio) + 0.5);
}

static void want_cost(const claim *c) {
    const world *w = find_world(c->world);
    for (int by = 0; by < N_COSTS; by++) {
        int of_arm, steps = fewer_steps(c, cost_ratio(c, by), &of_arm);
        job j;
        if (steps == 0 || !tuned(w, find_arm(of_arm ? c->arm : c->baseline), 0, &j)) continue;
        j.steps = steps;
        for (int s = 0; s < seeds_of(w); s++) {
            j.seed = seed_of(s);
            want(&j);
        }
    }
}

static void judge_cost(const claim *c, double ratio, judgement *g) {
    double a[MAX_SEEDS], b[MAX_SEEDS];
    const world *w = find_world(c->world);
    int of_arm, steps = fewer_steps(c, ratio, &of_arm), n;
    int of_a = values_with(w, c->arm, c->outcome, of_arm ? steps : 0, a);
    int of_b = values_with(w, c->baseline, c->outcome, of_arm ? 0 : steps, b);
    n = of_a < of_b ? of_a : of_b;
    memset(g, 0, sizeof *g);
    if (n < seeds_of(w) || isnan(ratio)) n = 0;
    g->r = statistics_paired((size_t)n, a, b);
    g->verdict = judge(&g->r, c->sign, c->margin, c->papers, c->kind == KEEPS, g->r.p);
    if (g->verdict == UNDERPOWERED && c->kind != KEEPS)
        g->seeds = judge_seeds(g->r.error * sqrt((double)n), c->margin, 0.05);
}

static void print_costs(const judgement *equal_steps) {
    print("| claim | world | equal steps | FLOPs of a step | at equal FLOPs | time of a step | at equal time |\n"
          "|---|---|---|--:|---|--:|---|\n");
    for (int c = 0; c < N_CLAIMS; c++) {
        const claim *k = &claims[c];
        const struct timed_pair *t = find_time(k);
        if (!is_on_cost(k) || equal_steps[c].verdict == NOT_RUN) continue;
        print("| `%s`: %s against %s | %s | %+.3f, ", k->id, k->arm, k->baseline, k->world, equal_steps[c].r.mean);
        print_verdict(k, &equal_steps[c]);
        for (int by = 0; by < N_COSTS; by++) {
            judgement g;
            double ratio = cost_ratio(k, by);
            judge_cost(k, ratio, &g);
            print(" | ");
            if (!isnan(ratio)) print("%.2f", ratio);
            if (by == BY_TIME && t != NULL) print(" [%.2f, %.2f]", t->low, t->high);
            if (g.verdict >= NOT_RUN) print(" | ");
            else print(" | %+.3f [%.3f, %.3f], ", g.r.mean, g.r.low, g.r.high);
            print_verdict(k, &g);
        }
        print(" |\n");
    }
}

#endif
