/* pictures.h - figures of the papers that need more than rows: clusters by principal components,
   norms of experts and correlation of tokens over training. Each figure trains a tuned router again
   with one seed. Part of bench.c. */
#ifndef BENCH_PICTURES_H
#define BENCH_PICTURES_H

enum { PICTURE_ROWS = 24, PICTURE_COLUMNS = 48, PICTURE_TIMES = WORLD_TIMES + 1, PICTURE_MOST = 8 };

/* Draws a figure into a file of examples/bench, or compares it with the file. */
static int picture_keep(const moe_figure *figure, const char *file) {
    char path[1024];
    moe_buffer kept = {0}, drawn = {0};
    moe_stream stream = moe_buffer_stream(&drawn);
    moe_error error;
    int failed;
    snprintf(path, sizeof path, "%s", example_file(file));
    (void)moe_file_read(path, &kept, NULL);
    failed = moe_report_svg(figure, &stream, &error) != MOE_OK ? complain(file, error.message)
                                                              : keep_or_verify(path, &kept, &drawn);
    moe_buffer_free(&kept);
    moe_buffer_free(&drawn);
    return failed;
}

/* Trains the tuned router with the first seed. The caller frees *s, also after a failure. */
static int picture_train(const char *in, const char *router, job *j, run_state *s, tokens *test) {
    static found f;
    moe_rng rng;
    moe_error error = {MOE_OK, "stopped"};
    memset(s, 0, sizeof *s);
    memset(&f, 0, sizeof f);
    if (!tuned(find_world(in), find_arm(router), 0, j)) return complain(in, "its rows are missing");
    fprintf(stderr, "%s, %s: training\n", in, router);
    return run_trained(j, s, &rng, test, &f, &error) != MOE_OK ? complain(in, error.message) : 0;
}

/* ---- clusters ---- */

enum { CLOUD = WORLD_TESTS * WORLD_TOKENS };

/* Tokens as the router saw them, their first choices and clusters, and their coordinates. */
typedef struct cloud {
    size_t n, d;
    double u[CLOUD * WORLD_WIDTH], at[2][CLOUD];
    int32_t expert[CLOUD], cluster[CLOUD];
} cloud;

static int cloud_fill(cloud *c, run_state *s, tokens *test) {
    moe_error error;
    c->n = 0;
    c->d = (size_t)s->j->w->d;
    for (int k = 0; k < WORLD_TESTS; k++) {
        moe_net_pass pass;
        const moe_routing *r;
        if (run_forward(s, &test[k], &pass, &error) != MOE_OK) return complain("tokens", error.message);
        r = moe_net_routing(&s->net, &pass, s->module);
        if (moe_routing_choices(r, 1, 0, c->expert + c->n) != MOE_OK) return complain("tokens", "no choices");
        for (size_t i = 0; i < test[k].n * c->d; i++) c->u[c->n * c->d + i] = (double)r->u[i];
        memcpy(c->cluster + c->n, test[k].cluster, test[k].n * sizeof *c->cluster);
        c->n += test[k].n;
    }
    return 0;
}

/* One step of the power iteration: next = C axis, C the covariance of centered tokens. */
static void cloud_power(const cloud *c, const double *axis, double *next) {
    memset(next, 0, c->d * sizeof *next);
    for (size_t t = 0; t < c->n; t++) {
        const double *u = c->u + t * c->d;
        double along = 0;
        for (size_t i = 0; i < c->d; i++) along += u[i] * axis[i];
        for (size_t i = 0; i < c->d; i++) next[i] += along * u[i];
    }
}

/* Projects the tokens onto their two largest principal components; each is subtracted from the
   tokens before the next is found. */
static void cloud_project(cloud *c) {
    double axis[WORLD_WIDTH], next[WORLD_WIDTH];
    for (size_t i = 0; i < c->d; i++) {
        double mean = 0;
        for (size_t t = 0; t < c->n; t++) mean += c->u[t * c->d + i] / (double)c->n;
        for (size_t t = 0; t < c->n; t++) c->u[t * c->d + i] -= mean;
    }
    for (int k = 0; k < 2; k++) {
        for (size_t i = 0; i < c->d; i++) axis[i] = i == (size_t)k ? 1 : 0.5;
        for (int step = 0; step < 500; step++) {
            double length = 0;
            cloud_power(c, axis, next);
            for (size_t i = 0; i < c->d; i++) length += next[i] * next[i];
            for (size_t i = 0; i < c->d && length > 0; i++) axis[i] = next[i] / sqrt(length);
        }
        for (size_t t = 0; t < c->n; t++) {
            double *u = c->u + t * c->d, along = 0;
            for (size_t i = 0; i < c->d; i++) along += u[i] * axis[i];
            for (size_t i = 0; i < c->d; i++) u[i] -= along * axis[i];
            c->at[k][t] = along;
        }
    }
}

/* Renumbers experts as the clusters whose tokens they have, greedily from the largest count. */
static void cloud_match(cloud *c, int experts) {
    int counts[WORLD_EXPERTS][WORLD_CLUSTERS] = {{0}}, as[WORLD_EXPERTS], taken[WORLD_CLUSTERS] = {0};
    for (size_t t = 0; t < c->n; t++) counts[c->expert[t]][c->cluster[t]]++;
    for (int e = 0; e < experts; e++) as[e] = -1;
    for (int pair = 0; pair < experts; pair++) {
        int best = -1, at = -1;
        for (int i = 0; i < experts * experts; i++) {
            const int e = i / experts, k = i % experts;
            if (as[e] >= 0 || taken[k] || (best >= 0 && counts[e][k] <= counts[best][at])) continue;
            best = e;
            at = k;
        }
        as[best] = at;
        taken[at] = 1;
    }
    for (size_t t = 0; t < c->n; t++) c->expert[t] = as[c->expert[t]];
}

/* The cell of token t along component k: `places` cells cover +-2.5 standard deviations; tokens
   beyond are in the outermost. */
static int cloud_place(const cloud *c, int k, size_t t, int places) {
    double squares = 0, at;
    for (size_t i = 0; i < c->n; i++) squares += c->at[k][i] * c->at[k][i];
    at = (1 + c->at[k][t] / (2.5 * sqrt(squares / (double)c->n))) / 2 * places;
    return at < 0 ? 0 : at < places ? (int)at : places - 1;
}

/* The map of the most frequent value among the tokens of each cell. */
static moe_figure *cloud_map(const cloud *c, const int32_t *value, int values, const char *title) {
    static int counts[PICTURE_ROWS][PICTURE_COLUMNS][WORLD_EXPERTS];
    int32_t *most = (int32_t *)report_grab(PICTURE_ROWS * PICTURE_COLUMNS, sizeof *most);
    moe_figure *f = report_add(MOE_FIGURE_MAP, title, PICTURE_ROWS, PICTURE_COLUMNS);
    memset(counts, 0, sizeof counts);
    for (size_t t = 0; t < c->n; t++)
        counts[cloud_place(c, 1, t, PICTURE_ROWS)][cloud_place(c, 0, t, PICTURE_COLUMNS)][value[t]]++;
    for (int i = 0; i < PICTURE_ROWS * PICTURE_COLUMNS; i++) {
        const int *n = counts[i / PICTURE_COLUMNS][i % PICTURE_COLUMNS];
        int best = 0;
        for (int e = 1; e < values; e++) best = n[e] > n[best] ? e : best;
        most[i] = n[best] > 0 ? best : -1;
    }
    f->experts = most;
    f->n_experts = values;
    f->caption = "Each place has the color of most of its tokens; percentages are of the colored area. Horizontal: "
                 "the first principal component of what the router scores; vertical: the second.";
    return f;
}

static int picture_clusters(const char *router, const char *name, const char *files[2]) {
    static tokens test[WORLD_TESTS];
    static cloud c;
    char title[160];
    run_state s;
    job j;
    int failed = picture_train("anisotropy_4", router, &j, &s, test) || cloud_fill(&c, &s, test);
    run_free(&s);
    if (failed) return 1;
    cloud_project(&c);
    cloud_match(&c, j.w->experts);
    snprintf(title, sizeof title, "Planted clusters, as the router of %s sees them", name);
    failed = picture_keep(cloud_map(&c, c.cluster, j.w->clusters, title), files[0]);
    snprintf(title, sizeof title, "Experts that %s chose first, numbered as clusters", name);
    return failed | picture_keep(cloud_map(&c, c.expert, j.w->experts, title), files[1]);
}

/* ---- curves over training ---- */

static double watched[PICTURE_MOST][PICTURE_TIMES];
static int watched_row;

/* The mean norm of each expert's projection, which is its score, over the test tokens. */
static moe_status watch_norms(run_state *s, tokens *test, int time, moe_error *error) {
    for (int k = 0; k < WORLD_TESTS; k++) {
        moe_net_pass pass;
        const moe_routing *r;
        moe_status status = run_forward(s, &test[k], &pass, error);
        if (status != MOE_OK) return status;
        r = moe_net_routing(&s->net, &pass, s->module);
        for (size_t i = 0; i < test[k].n * r->n_experts; i++)
            watched[i % r->n_experts][time] += (double)r->logits[i] / (double)test[k].n / WORLD_TESTS;
    }
    return MOE_OK;
}

/* The mean cosine between tokens as the router sees them. */
static moe_status watch_cosine(run_state *s, tokens *test, int time, moe_error *error) {
    for (int k = 0; k < WORLD_TESTS; k++) {
        double scratch[WORLD_WIDTH], cosine;
        moe_net_pass pass;
        moe_status status = run_forward(s, &test[k], &pass, error);
        if (status == MOE_OK)
            status = moe_token_cosine(test[k].n, (size_t)s->j->w->d,
                                      moe_net_routing(&s->net, &pass, s->module)->u, NULL, scratch, &cosine);
        if (status != MOE_OK) return status;
        watched[watched_row][time] += cosine / WORLD_TESTS;
    }
    return MOE_OK;
}

static int picture_curves(const char *in, const char *const *routers, int n_routers, int n_lines, const char *title,
                          const char *what, const char *file) {
    static tokens test[WORLD_TESTS];
    static double x[PICTURE_TIMES];
    moe_figure *f;
    int failed = 0;
    memset(watched, 0, sizeof watched);
    for (watched_row = 0; watched_row < n_routers && !failed; watched_row++) {
        run_state s;
        job j;
        failed = picture_train(in, routers[watched_row], &j, &s, test);
        run_free(&s);
    }
    if (failed) return 1;
    for (int t = 0; t < PICTURE_TIMES; t++) x[t] = (double)t / WORLD_TIMES;
    f = report_add(MOE_FIGURE_LINES, title, (size_t)n_lines, PICTURE_TIMES);
    f->values = report_numbers(watched[0], PICTURE_MOST * PICTURE_TIMES);
    f->x = x;
    f->column_label = "share of the steps";
    f->value_label = what;
    if (n_routers > 1) f->row_names = routers;
    else f->row_label = "expert";
    return picture_keep(f, file);
}

static int do_pictures(void) {
    static const char *const autonomy[] = {"autonomy"}, *const tokens_of[] = {"locmoe_plus", "top1"};
    static const char *files[2][2] = {{"bench/pictures/clusters_top_k.svg", "bench/pictures/experts_top_k.svg"},
                                      {"bench/pictures/clusters_adaptive.svg", "bench/pictures/experts_adaptive.svg"}};
    int failed;
    if (read_rows(0)) return 1;
    if (options.verify && n_rows > 0 && !is_of_this_machine(&rows[0])) {
        printf("pictures are of another compiler or kernels\n");
        return 0;
    }
    failed = picture_clusters("smoe", "top-k", files[0]);
    failed |= picture_clusters("clustering", "adaptive clustering", files[1]);
    world_watch = watch_norms;
    failed |= picture_curves("subspaces", autonomy, 1, find_world("subspaces")->experts,
                             "Autonomy of experts in subspaces: norms over training",
                             "mean norm of an expert's projection", "bench/pictures/norms.svg");
    world_watch = watch_cosine;
    failed |= picture_curves("class_tokens", tokens_of, 2, 2, "Class tokens: correlation of tokens over training",
                             "mean cosine between tokens", "bench/pictures/cosine.svg");
    world_watch = NULL;
    return failed | report_write_added("bench", "Pictures of routers");
}

#endif
