/* check.h - bench --check: the tables, the statistics against published values, worlds and their
   oracle, rows, resuming, README.md. */
#ifndef BENCH_CHECK_H
#define BENCH_CHECK_H

static int n_passed, n_failed;

static void check(int good, const char *what) {
    n_passed += good;
    n_failed += !good;
    if (!good) printf("FAILED: %s\n", what);
}

static int is_near(double got, double wanted) { return fabs(got - wanted) <= 1e-6 * (1 + fabs(wanted)); }

static void check_claims(void) {
    int primary[2] = {0, 0};
    int valid = 1, different = 1;
    for (int c = 0; c < N_CLAIMS; c++) {
        const claim *k = &claims[c];
        const world *w = find_world(k->world);
        valid = valid && w != NULL && find_arm(k->arm) != NULL && find_arm(k->baseline) != NULL;
        valid = valid && k->margin > 0 && abs(k->sign) == 1 && strpbrk(k->text, ",|") == strchr(k->text, ',');
        for (int i = 0; i < c; i++) different = different && strcmp(claims[i].id, k->id) != 0;
        if (w != NULL && k->kind == PRIMARY) primary[strcmp(w->part, "worlds") != 0]++;
    }
    check(valid, "every claim names a world and two routers, has a sign and a margin");
    check(different, "every claim has its own name");
    check(primary[0] == 5 && primary[1] == 5, "each of the five papers has one primary claim in each family");
    for (int w = 0; w < N_WORLDS; w++) {
        double numbers[8];
        valid = valid && read_list(worlds[w].rates, numbers) > 0 && read_list(worlds[w].balances, numbers) > 0;
        valid = valid && worlds[w].seeds < FIRST_TUNING && worlds[w].seeds <= MAX_SEEDS;
    }
    check(valid, "every world has a grid, and seeds for judging that are not those for tuning");
}

/* Against published tables and numbers computed by hand. */
static void check_statistics(void) {
    static const double quantiles[][3] = {{0.975, 1, 12.706205}, {0.975, 4, 2.776445}, {0.975, 19, 2.093024},
                                          {0.95, 9, 1.833113},   {0.05, 9, -1.833113}, {0.995, 30, 2.749996}};
    const double p[] = {0.01, 0.04, 0.03, 0.005}, a[] = {2, 4, 6, 8, 10};
    const double b[] = {1, 2, 3, 4, 5};
    const double blocks_of_two[] = {1, 3};
    double holm[4], low, high;
    statistics_result r = statistics_paired(5, a, b);
    for (size_t i = 0; i < sizeof quantiles / sizeof *quantiles; i++)
        check(is_near(statistics_t_quantile(quantiles[i][0], quantiles[i][1]), quantiles[i][2]), "quantile of t");
    check(is_near(statistics_t_p(-2.776445105, 4), 0.05), "p of t");
    statistics_holm(4, p, holm);
    check(is_near(holm[0], 0.03) && is_near(holm[1], 0.06) && is_near(holm[2], 0.06) && is_near(holm[3], 0.02), "Holm");
    check(is_near(r.mean, 3) && is_near(r.error, sqrt(0.5)) && is_near(r.high, 3 + 2.776445105 * sqrt(0.5)), "pairs");
    check(statistics_paired(3, b + 1, b + 1).p >= 1 && statistics_paired(1, a, b).p >= 1, "no difference, no pairs");
    judge_blocks(blocks_of_two, 2, &low, &high);
    check(is_near(low, 1) && is_near(high, 3), "bootstrap of two blocks");
}

static void check_verdicts(void) {
    static const struct {
        double mean, half;
        int sign, papers, keeps, verdict;
    } cases[] = {{0.1, 0.02, 1, 1, 0, REPRODUCED}, {-0.1, 0.02, -1, 1, 0, REPRODUCED},
                 {-0.1, 0.02, 1, 1, 0, OPPOSITE},  {0.02, 0.01, 1, 1, 0, EXCLUDED},
                 {0, 0.05, 1, 1, 0, EXCLUDED},     {0, 0.05, 1, 0, 0, NO_EFFECT},
                 {0, 0.2, 1, 1, 0, UNDERPOWERED},  {0.05, 0.06, -1, 0, 1, UNDERPOWERED},
                 {0, 0.09, -1, 0, 1, REPRODUCED},  {0.3, 0.1, -1, 0, 1, OPPOSITE}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double m = cases[i].mean, h = cases[i].half;
        statistics_result r = {8, m, h / 2.3, m - h, m + h, fabs(m) > h ? 0.001 : 0.5};
        check(judge(&r, cases[i].sign, 0.1, cases[i].papers, cases[i].keeps, r.p) == cases[i].verdict, "verdict");
    }
    check(judge_seeds(0.1, 0.1, 0.05) == 18, "seeds that would decide"); /* 2 t(17) 0.1 / sqrt(18) < 0.1 */
    /* (t(0.975, 23) + t(0.995, 23)) 0.1 / sqrt(24) = 0.0995, and 0.102 with 23 seeds */
    check(judge_seeds(0.1, 0.1, 0.01) == 24, "seeds that would decide at a corrected level");
    for (int keeps = 0; keeps < 2; keeps++) {
        double a[] = {1, HUGE_VAL, 1};
        statistics_result r = statistics_paired(3, a, NULL);
        check(judge(&r, 1, 0.1, 1, keeps, r.p) == NO_NUMBER, "a diverged run decides nothing");
        a[1] = MISSING;
        r = statistics_paired(3, a, NULL);
        check(judge(&r, 1, 0.1, 1, keeps, r.p) == NO_NUMBER, "nor does a missing outcome");
    }
}

/* Losses that scatter around a law; those of the largest width are higher by `off`. */
static void law_make(law_rows *r, const law *l, double scatter, double off, moe_rng *rng) {
    memset(r, 0, sizeof *r);
    r->seeds = 3;
    for (int e = 0; e < LAW_EXPERTS; e++)
        for (int w = 0; w < LAW_WIDTHS; w++) {
            r->mean.size[e][w] = 1e-6 * law_widths[w] * (600 + 40 * law_widths[w] + 5 * law_experts[e]);
            for (int s = 0; s < r->seeds; s++)
                r->loss[e][w][s] = law_at(l, e, r->mean.size[e][w]) + scatter * (double)moe_rng_normal(rng) +
                                   (w == LAW_FITTED ? off : 0);
            r->mean.loss[e][w] = statistics_paired((size_t)r->seeds, r->loss[e][w], NULL).mean;
        }
}

/* How many of 60 sets of losses with this scatter and offset get the verdict. */
static int law_count(const law *l, double scatter, double off, int verdict) {
    static law_rows r;
    moe_rng rng;
    int n = 0;
    moe_rng_seed(&rng, 2);
    for (int i = 0; i < 60; i++) {
        law_make(&r, l, scatter, off, &rng);
        n += law_test(&r, 200).verdict == verdict;
    }
    return n;
}

static void check_laws(void) {
    static const law known[] = {{1.1, {0.2, 0.19, 0.17}, 0.4, 0}, {0, {1.3, 1.3, 1.2}, 0.15, 0}};
    static const law below = {-2, {3.2, 3.2, 3.1}, 0.05, 0};
    static const struct {
        double slope, scatter;
        int verdict;
    } trends[] = {{-0.03, 0, REPRODUCED}, {0.03, 0, OPPOSITE}, {0, 0.002, NO_EFFECT}, {0, 0.1, UNDERPOWERED}};
    static law_rows r, other;
    moe_rng rng;
    law l;
    moe_rng_seed(&rng, 1);
    for (int i = 0; i < 2; i++) {
        int near = 1;
        law_make(&r, &known[i], 0, 0.1, &rng); /* the largest width is not fitted */
        l = law_fit(&r.mean);
        for (int e = 0; e < LAW_EXPERTS; e++) near = near && fabs(l.b[e] - known[i].b[e]) < 1e-4;
        check(near && fabs(l.a - known[i].a) < 1e-4 && fabs(l.c - known[i].c) < 1e-4, "a known law is recovered");
    }
    law_make(&r, &below, 0, 0, &rng);
    l = law_fit(&r.mean);
    check(l.a >= 0 && l.squares > 0 && l.squares < 1e-3, "no law has a loss below 0 for large models");
    check(law_count(&known[0], 0.004, 0, LAW_INSIDE) >= 52, "a law that holds is inside");
    check(law_count(&known[0], 0.004, 0.015, LAW_OUTSIDE) >= 54, "a law that breaks above is outside");
    check(law_count(&known[0], 0.004, -0.015, LAW_OUTSIDE) >= 54, "so is one that breaks below");
    check(law_count(&known[0], 0.05, 0, LAW_WIDE) >= 50, "a wide interval tests nothing");
    r.mean.loss[1][LAW_FITTED] = HUGE_VAL;
    check(law_test(&r, 200).verdict == LAW_DIVERGED, "a diverged run has no law");
    for (size_t i = 0; i < sizeof trends / sizeof *trends; i++) {
        judgement g;
        law_make(&r, &known[0], 0, 0, &rng);
        law_make(&other, &known[0], trends[i].scatter, 0, &rng);
        for (int e = 0; e < LAW_EXPERTS; e++)
            for (int w = 0; w < LAW_WIDTHS; w++)
                for (int s = 0; s < r.seeds; s++) r.loss[e][w][s] += trends[i].slope * log2(law_widths[w]) + 0.01 * e;
        g = law_trend(&r, &other);
        check(g.verdict == trends[i].verdict && fabs(g.r.mean - trends[i].slope) < 1e-9 + trends[i].scatter, "a trend");
    }
}

/* Rows of all runs for scaling, with known losses, which are higher at other rates than the middle
   one. */
static void check_law_rows(void) {
    static law_rows read;
    int known = 1;
    forget_rows();
    for (int i = 0; i < N_WORLDS; i++)
        for (int run = 0; strcmp(worlds[i].part, "scaling") == 0 && run < 2 * (3 * 2 + 3); run++) {
            static row r;
            const char *name = law_arms[run % 2];
            int n = run / 2, rate = n < 6 ? n % 3 : 1;
            double rates[8];
            job j;
            known = known && read_list(worlds[i].rates, rates) == 3 && fabs(rates[1] * worlds[i].d - 0.16) < 0.002;
            j = make_job(&worlds[i], find_arm(name), n < 6, n < 6 ? FIRST_TUNING + n / 3 : n - 5, rates[rate], 0.01);
            snprintf(r.world, sizeof r.world, "%s", worlds[i].name);
            snprintf(r.arm, sizeof r.arm, "%s", name);
            snprintf(r.stage, sizeof r.stage, "%s", n < 6 ? "tune" : "judge");
            arm_router(&j, r.router);
            r.seed = j.seed;
            r.rate = j.rate;
            r.balance = j.balance;
            r.steps = job_steps(&j);
            r.f.value[LOSS] = 2 - 0.01 * worlds[i].d + (rate != 1) + 0.001 * worlds[i].experts;
            r.f.value[ACTIVE] = 1000 * worlds[i].d;
            known = known && keep_row(&r) == 0;
        }
    for (int a = 0; a < LAW_ARMS; a++) {
        law_read(law_arms[a], &read);
        known = known && read.seeds == 3;
        for (int e = 0; e < LAW_EXPERTS; e++)
            for (int w = 0; w < LAW_WIDTHS; w++)
                known = known && is_near(read.mean.size[e][w], 0.001 * law_widths[w]) &&
                        is_near(read.mean.loss[e][w], 2 - 0.01 * law_widths[w] + 0.001 * law_experts[e]);
    }
    check(known, "laws have their cells' rows");
    n_rows--; /* the last run of the largest width with 16 experts */
    last_row[N_WORLDS - 1][find_arm(law_arms[1]) - arms] = rows[n_rows].next;
    law_read(law_arms[1], &read);
    check(read.seeds == 0 && law_test(&read, 200).verdict == LAW_NOT_RUN, "all of them");
    forget_rows();
}

/* An invalid command line is refused; options are as before. */
static void check_refused(const char *first, const char *second, const char *third, const char *what) {
    char name[] = "bench", one[40], two[40], three[40];
    char *words[4];
    snprintf(one, sizeof one, "%s", first);
    snprintf(two, sizeof two, "%s", second);
    snprintf(three, sizeof three, "%s", third);
    words[0] = name;
    words[1] = one;
    words[2] = two;
    words[3] = three;
    check(read_options(*three != '\0' ? 4 : *two != '\0' ? 3 : 2, words) != 0, what);
    memset(&options, 0, sizeof options);
    bench_short = 0;
}

static void check_options_refused(void) {
    fputs("the next seven complaints are expected:\n", stderr);
    check_refused("--only", "worlds,digtis", "", "every word of --only names something");
    check_refused("--seeds", "1", "", "one seed");
    check_refused("--write", "--unseen", "", "pages of other seeds");
    check_refused("--verify", "--seeds", "3", "pages of fewer seeds");
    check_refused("--write", "--short", "", "pages of fewer steps");
    check_refused("--write", "--check", "", "two things to do");
    check_refused("--short", "", "", "short runs among the published rows");
}

static void check_recovery(void) {
    static const double swapped[] = {0, 5, 5, 0}, shared[] = {5, 5, 0, 0};
    static const double three[] = {4, 0, 3, 3, 0, 4};
    check(is_near(recovery(swapped, 2, 2), 1), "experts may have any order");
    check(is_near(recovery(shared, 2, 2), 0.5), "an expert counts for one cluster");
    check(is_near(recovery(three, 3, 2), 8.0 / 14), "more experts than clusters");
}

/* Whether two runs found the same, except for time. */
static int same_found(const found *a, const found *b) {
    for (int i = 0; i < N_OUTCOMES; i++)
        if (i != MS && !(isnan(a->value[i]) && isnan(b->value[i])) && fabs(a->value[i] - b->value[i]) > 0) return 0;
    return strcmp(a->lists, b->lists) == 0;
}

/* Runs a job twice, and reads its row as written. */
static void check_run(const char *world_name, const char *arm_name, const char *what) {
    static row one, two, three;
    static char line[LINE], again[LINE];
    const world *w = find_world(world_name);
    job j = make_job(w, find_arm(arm_name), 0, 1, 0.01, 0.01);
    moe_error error = {MOE_OK, ""};
    int good = run_job(&j, &one, &error) == MOE_OK && run_job(&j, &two, &error) == MOE_OK;
    if (!good) printf("%s: %s\n", arm_name, error.message);
    check(good && same_found(&one.f, &two.f), what);
    strcpy(one.version, "0.0.1"); /* that of the row, not of this program */
    row_line(&one, line);
    check(read_row(line, &three) && strcmp(three.router, one.router) == 0 && three.seed == one.seed &&
              fabs(three.f.value[LOSS] - one.f.value[LOSS]) < 1e-6,
          "a row is read as it was written");
    row_line(&three, again);
    check(strcmp(line, again) == 0, "and written as it was read");
    line[strlen(line) - 3] = '\0';
    check(!read_row(line, &three), "an incomplete row is refused");
}

/* Writes the file "check" of rows; 1: done. */
static int check_write(const char *mode, const char *text) {
    FILE *f = fopen(path_of("check"), mode);
    int good = f != NULL && fputs(text, f) >= 0;
    return f != NULL && fclose(f) == 0 && good;
}

/* What a stopped run leaves of a new file; lines of other programs. */
static void check_damaged(const row *r) {
    static char line[LINE + 40];
    static const char *const begun[] = {"", "claims,world,che"};
    for (int i = 0; i < 2; i++) {
        forget_rows();
        check(check_write("wb", begun[i]) && read_part("check", 1) == 0 && append_row("check", r) == 0, "a file begun");
        check(read_part("check", 1) == 0 && n_rows == 1, "a file that was only begun is continued");
    }
    memset(line, 'x', sizeof line - 2);
    line[sizeof line - 2] = '\n';
    fputs("the next two complaints are expected:\n", stderr);
    forget_rows();
    check(check_write("ab", line) && append_row("check", r) == 0 && read_part("check", 0) != 0,
          "a long line does not hide the rows after it");
    forget_rows();
    check(check_write("wb", "claims,worlds\n") && read_part("check", 0) != 0, "another table is refused");
}

/* Times are replaced only when all have been measured. */
static void check_times(void) {
    char kept[8] = "";
    FILE *f = fopen(path_of("time"), "rb");
    if (f != NULL) { /* the user's */
        fclose(f);
        return;
    }
    forget_rows();
    if ((f = fopen(path_of("time"), "wb")) == NULL || fputs("kept", f) < 0 || fclose(f) != 0) return;
    fputs("the next complaint is expected:\n", stderr);
    check(do_times() != 0, "times need rows");
    if ((f = fopen(path_of("time"), "rb")) != NULL && fgets(kept, sizeof kept, f) != NULL && fclose(f) == 0)
        remove(path_of("time"));
    check(strcmp(kept, "kept") == 0, "the old times are kept");
}

/* A file of rows: appended to, with an incomplete line, with rows of two builds or texts. */
static void check_file(void) {
    static row r;
    job j = make_job(find_world("means"), find_arm("autonomy"), 0, 1, 0.01, 0.01);
    moe_error error;
    options.rows = ".";
    remove(path_of("check"));
    check(run_job(&j, &r, &error) == MOE_OK && append_row("check", &r) == 0 && append_row("check", &r) == 0, "a file");
    check(check_write("ab", "aoe.means,means,0000"), "a file");
    forget_rows();
    check(read_part("check", 1) == 0 && n_rows == 2 && find_row(&j) != NULL, "an incomplete line is left out");
    check(append_row("check", &r) == 0, "the next line replaces it");
    forget_rows();
    check(read_part("check", 0) == 0 && n_rows == 3, "no row is lost");
    check(check_part(&j, "check") == 0, "rows of this build are continued");
    fputs("the next four complaints are expected:\n", stderr);
    rows[0].checksum = 1;
    check(check_part(&j, "check") != 0, "rows of another text are not continued");
    strcpy(rows[0].build, "another");
    rows[0].steps = 10 * r.steps; /* short runs among others */
    check(check_part(&j, "check") != 0, "rows of another build are not continued");
    r.checksum = 1;
    check(append_row("check", &r) == 0, "a row of another text is appended");
    forget_rows();
    check(read_part("check", 0) != 0, "a file of two texts is refused");
    r.checksum = 0;
    remove(path_of("check"));
    check(append_row("check", &r) == 0, "a file");
    strcpy(r.build, "1,gcc 1,c,1");
    check(append_row("check", &r) == 0, "a row of another build is appended");
    forget_rows();
    check(read_part("check", 0) != 0, "a file of two builds is refused");
    check_damaged(&r);
    check_times();
    remove(path_of("check"));
    options.rows = NULL;
    forget_rows();
}

/* Every arm of every claim can be trained. */
static void check_arms(void) {
    for (int c = 0; c < N_CLAIMS; c++)
        for (int side = 0; side < 2; side++) {
            const char *name = side ? claims[c].arm : claims[c].baseline;
            const world *w = find_world(claims[c].world);
            world few = *w;
            job j = make_job(&few, find_arm(name), 1, 1, 0.01, 0.01);
            moe_error error = {MOE_OK, ""};
            found f = {{0}, ""};
            moe_status status;
            few.steps = few.tuning_steps = few.kind == TEXT || few.kind == PATCHES ? 1 : 20;
            if (few.kind == TEXT && few.strength > 0) continue; /* words: as bytes */
            if (few.kind == TEXT) status = run_text(&j, &f, &error);
            else
                status = few.kind == DIGITS || few.kind == PATCHES ? run_digits(&j, &f, &error)
                                                                   : run_planted(&j, &f, &error);
            if (status != MOE_OK) printf("%s, %s: %s\n", w->name, name, error.message);
            check(status == MOE_OK, "the arm is trained");
        }
}

/* A stopped run on text resumes with the same bits. */
static void check_resume(void) {
    static found whole, parts;
    world w = *find_world("bytes");
    job j = make_job(&w, find_arm("clustering"), 0, 1, 0.003, 0.01);
    moe_error error = {MOE_OK, ""};
    moe_status status;
    w.steps = 20;
    status = run_text(&j, &whole, &error);
    if (status != MOE_OK) printf("%s\n", error.message);
    check(status == MOE_OK && whole.value[FLUCTUATION] >= 0 && whole.value[INSTABILITY] > 0, "a run on text");
    bench_stopped = 1; /* ends after its first step, and again after the next */
    check(run_text(&j, &parts, &error) == MOE_ERR_STOPPED, "a run is stopped");
    memset(&parts, 0, sizeof parts);
    check(run_text(&j, &parts, &error) == MOE_ERR_STOPPED, "a run is stopped again");
    bench_stopped = 0;
    memset(&parts, 0, sizeof parts);
    status = run_text(&j, &parts, &error);
    if (status != MOE_OK) printf("%s\n", error.message);
    check(status == MOE_OK && same_found(&whole, &parts), "a resumed run ends with the same bits");
}

/* --minutes stops within a run on text. */
static void check_minutes(void) {
#ifndef _WIN32
    static found f;
    world w = *find_world("bytes");
    job j = make_job(&w, find_arm("smoe"), 1, 2, 0.003, 0.01);
    moe_error error = {MOE_OK, ""};
    time_t begin = time(NULL);
    w.tuning_steps = 3000;
    options.minutes = 0.01;
    limit_time();
    check(run_text(&j, &f, &error) == MOE_ERR_STOPPED && difftime(time(NULL), begin) < 60, "time stops a run");
    options.minutes = 0;
    bench_stopped = 0;
    text_clean(&j);
#endif
}

/* A run that was stopped after its last step, and a checkpoint of another text. */
static void check_resume_short(const char *text, const char *other) {
    static found f[3];
    world w = *find_world("bytes");
    job j = make_job(&w, find_arm("smoe"), 1, 1, 0.003, 0.01);
    moe_error error = {MOE_OK, ""};
    moe_status status;
    w.tuning_steps = 2;
    bench_stopped = 1;
    for (int i = 0; i < 2; i++) status = run_text(&j, &f[i], &error);
    bench_stopped = 0;
    check(status == MOE_ERR_STOPPED, "a run is stopped after its last step");
    memset(f, 0, sizeof f);
    status = run_text(&j, &f[0], &error);
    if (status == MOE_OK) status = run_text(&j, &f[1], &error);
    check(status == MOE_OK && f[1].value[LOSS] > 0 && fabs(f[0].value[LOSS] - f[1].value[LOSS]) <= 0,
          "and resumed, it has its loss");
    bench_stopped = 1;
    check(run_text(&j, &f[0], &error) == MOE_ERR_STOPPED, "a run is stopped");
    bench_stopped = 0;
    texts_free();
    if (texts_read(0, other, text)) return;
    memset(f, 0, sizeof f);
    for (int i = 1; i < 3 && status == MOE_OK; i++) status = run_text(&j, &f[i], &error);
    check(status == MOE_OK && same_found(&f[1], &f[2]), "a checkpoint of another text is not resumed");
    texts_free();
    if (texts_read(0, text, other)) return;
    text_clean(&j);
}

static int check_all(void) {
    static judgement g[N_CLAIMS];
    const char *const *headers = example_headers();
    check_claims();
    check_statistics();
    check_verdicts();
    check_laws();
    check_law_rows();
    check_recovery();
    check_options_refused();
    bench_short = 1;
    check_run("means", "autonomy", "a world gives the same numbers twice");
    check_run("topics", "similarity_swapped", "so does a router that is swapped in");
    check_file();
    bench_short = 0;
    if (texts_read(0, headers[0], headers[1]) || digits_read()) return 1;
    check_resume();
    check_minutes();
    check_resume_short(headers[0], headers[1]);
    check_arms();
    texts_free(); /* rows of any text count again */
    if (read_rows(0) || read_times()) return 1;
    judge_all(g);
    options.verify = 1;
    check(do_page(g) == 0, "README.md matches the rows");
    check(do_again(0) == 0, "repeated runs match their rows");
    check(do_pictures() == 0, "pictures match");
    printf("%d passed, %d failed\n", n_passed, n_failed);
    return n_failed > 0;
}

#endif
