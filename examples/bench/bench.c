/* Measures claims of papers about routers in planted worlds, where the best routing is known, on
   text and on digits. Claims are declared before they are run; routers are tuned and judged on
   different seeds. claims.h has the tables, README.md the results.
     sh examples/run bench */

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* fork, truncate */
#endif
#define MOE_IMPLEMENTATION
#include "moe.h"
#include "../extras/moe_classic.h"
#include "../report.h"
#include "claims.h"
#include "judge.h"
#include "worlds.h"
#include "texts.h"
#include "digits.h"

#include <signal.h>
#include <stdarg.h>
#ifndef _WIN32
#include <sys/wait.h>
#endif

/* Set by examples/bench/run: the commit, and checksums of the files that the rows of each part
   depend on. */
#ifndef BENCH_COMMIT
#define BENCH_COMMIT unknown
#endif
#ifndef BENCH_WORLDS
#define BENCH_WORLDS unknown
#define BENCH_TEXTS unknown
#define BENCH_DIGITS unknown
#endif
#if defined __clang__
#define BENCH_COMPILER "clang " BENCH_TEXT(__clang_major__)
#elif defined __TINYC__
#define BENCH_COMPILER "tcc"
#elif defined __GNUC__
#define BENCH_COMPILER "gcc " BENCH_TEXT(__GNUC__)
#else
#define BENCH_COMPILER "unknown"
#endif
#define BENCH_TEXT(x) BENCH_TEXT2(x)
#define BENCH_TEXT2(x) #x

enum { MAX_JOBS = 8192, MAX_SEEDS = 64, LINE = 8192, FIELD = 2400, MAX_BLOCKS = 64, FIRST_TUNING = 1001 };

static const char help[] =
    "bench [options]       makes the runs that the claims still need and prints verdicts\n"
    "  --only A,B          only these claims, worlds or parts: worlds text short words scaling digits, toy,\n"
    "                      aoe.means (the planted worlds; --only digits,short,text,words,scaling: the others)\n"
    "  --rows FOLDER       the folder of rows (examples/bench/results); recorded runs are not repeated\n"
    "  --jobs N            parallel processes (1)\n"
    "  --minutes N         stops after that time; the same command continues, within a run on text too\n"
    "  --text FILE --test FILE   text to train on, and to judge on (WikiText's validation and test articles)\n"
    "  --seeds N           judges on N seeds instead of the declared number\n"
    "  --unseen            judges on seeds from 5001 on, which no published row has used\n"
    "  --short             a tenth of the steps, to try the program out; use another --rows\n"
    "bench --list          claims, worlds and routers\n"
    "bench --time          times steps of the routers of claims on loss side by side, for verdicts at equal time\n"
    "bench --tables        prints the tables of README.md from the recorded rows\n"
    "bench --write         writes them into the README.md here and that of the library, and draws the figure\n"
    "bench --verify        compares these files with the rows\n"
    "bench --again         repeats a recorded run of every router in every world but for text and compares the bits\n"
    "bench --pictures      trains some routers again and draws clusters, norms and correlation into pictures/;\n"
    "                      with --verify: compares them\n"
    "bench --check         tests the program\n" REPORT_HELP;

static struct {
    const char *only, *rows, *text, *test;
    int jobs, seeds, unseen, list, tables, write, verify, check, time, again, pictures;
    double minutes;
} options;

static int complain(const char *what, const char *why) {
    fprintf(stderr, "bench: %s: %s\n", what, why);
    return 1;
}

static void on_signal(int number) { bench_stopped = number; }

static const world *find_world(const char *name) {
    for (int i = 0; i < N_WORLDS; i++)
        if (strcmp(worlds[i].name, name) == 0) return &worlds[i];
    return NULL;
}

static const arm *find_arm(const char *name) {
    for (int i = 0; i < N_ARMS; i++)
        if (strcmp(arms[i].name, name) == 0) return &arms[i];
    return NULL;
}

/* ---- rows ---- */

/* One finished run. */
typedef struct row {
    const char *file; /* the part whose file it was read from */
    char world[24], arm[32], router[2 * TEXT_ROOM + 80], stage[8], version[16], build[96], commit[48];
    uint64_t checksum;
    int seed, steps;
    double rate, balance, seconds;
    found f;
    size_t next; /* 1 + the index of the previous row of the same world and router */
} row;

static row *rows;
static size_t n_rows, room_for_rows;
static size_t last_row[N_WORLDS][N_ARMS]; /* 1 + the index of the last row */

static void forget_rows(void) {
    n_rows = 0;
    memset(last_row, 0, sizeof last_row);
}

#define COLUMNS \
    "claims,world,checksum,arm,router,stage,seed,rate,balance,steps,outcomes,lists,version,commit,build," \
    "compiler,kernels,threads,seconds\n"

/* The file of a run: its world's, or cost.csv if equal cost sets the number of steps. */
static const char *part_of_run(const world *w, int tuning, int steps) {
    job j;
    memset(&j, 0, sizeof j);
    j.w = w;
    j.tuning = tuning;
    return steps == job_steps(&j) ? w->part : "cost";
}

static const char *part_of_job(const job *j) { return part_of_run(j->w, j->tuning, job_steps(j)); }

static const char *path_of(const char *part) {
    static char path[1100];
    if (options.rows != NULL) snprintf(path, sizeof path, "%s/%s.csv", options.rows, part);
    else {
        char name[64];
        snprintf(name, sizeof name, "bench/results/%s.csv", part);
        snprintf(path, sizeof path, "%s", example_file(name));
    }
    return path;
}

/* The build, which must be the same in all rows of a file. */
static const char *this_build(const char *part) {
    static char text[96];
    const char *sources = strcmp(part, "worlds") == 0 || *part == 'c' ? BENCH_TEXT(BENCH_WORLDS)
                          : *part == 'd'                              ? BENCH_TEXT(BENCH_DIGITS)
                                                                      : BENCH_TEXT(BENCH_TEXTS);
    snprintf(text, sizeof text, "%s," BENCH_COMPILER ",%s,1", sources, moe_kernels_select(MOE_KERNELS_AUTO)->name);
    return text;
}

static void row_line(const row *r, char *line) {
    size_t n = 0;
    int first = 1;
    for (int c = 0; c < N_CLAIMS; c++) {
        const claim *k = &claims[c];
        if (strcmp(k->world, r->world) != 0 || (strcmp(k->arm, r->arm) != 0 && strcmp(k->baseline, r->arm) != 0))
            continue;
        n += (size_t)sprintf(line + n, "%s%s", first ? "" : " ", k->id);
        first = 0;
    }
    n += (size_t)sprintf(line + n, ",%s,%016llx,%s,%s,%s,%d,%.9g,%.9g,%d,", r->world, (unsigned long long)r->checksum,
                         r->arm, r->router, r->stage, r->seed, r->rate, r->balance, r->steps);
    first = 1;
    for (int i = 0; i < N_OUTCOMES; i++) {
        if (isnan(r->f.value[i])) continue;
        n += (size_t)sprintf(line + n, "%s%s=%.9g", first ? "" : " ", outcomes[i].name, r->f.value[i]);
        first = 0;
    }
    sprintf(line + n, ",%s,%s,%s,%s,%.2f\n", r->f.lists, r->version, r->commit, r->build, r->seconds);
}

/* The next field of a line, up to `end`. */
static int next_field(const char **at, char end, char *out, size_t room) {
    size_t n = strcspn(*at, ",\n");
    if (n >= room || (*at)[n] != end) return 0;
    memcpy(out, *at, n);
    out[n] = '\0';
    *at += n + 1;
    return 1;
}

/* Numbers by name: "loss=0.1 flip=0.2". */
static int read_outcomes(const char *text, found *f) {
    for (int i = 0; i < N_OUTCOMES; i++) f->value[i] = MISSING;
    while (*text != '\0') {
        size_t length = strcspn(text, "="), i = 0;
        char *end;
        while (i < N_OUTCOMES && (strlen(outcomes[i].name) != length || strncmp(outcomes[i].name, text, length) != 0))
            i++;
        if (i == N_OUTCOMES || text[length] != '=') return 0;
        f->value[i] = strtod(text + length + 1, &end);
        if (end == text + length + 1 || (*end != ' ' && *end != '\0')) return 0;
        text = end + (*end == ' ');
    }
    return 1;
}

static int read_row(const char *line, row *r) {
    char claimed[FIELD], field[FIELD], compiler[24], kernels[16], threads[8];
    char *end;
    if (!next_field(&line, ',', claimed, sizeof claimed) || !next_field(&line, ',', r->world, sizeof r->world) ||
        find_world(r->world) == NULL || !next_field(&line, ',', field, sizeof field))
        return 0;
    r->checksum = strtoull(field, &end, 16);
    if (!next_field(&line, ',', r->arm, sizeof r->arm) || find_arm(r->arm) == NULL ||
        !next_field(&line, ',', r->router, sizeof r->router) || !next_field(&line, ',', r->stage, sizeof r->stage) ||
        !next_field(&line, ',', field, sizeof field))
        return 0;
    r->seed = atoi(field);
    if (!next_field(&line, ',', field, sizeof field)) return 0;
    r->rate = strtod(field, NULL);
    if (!next_field(&line, ',', field, sizeof field)) return 0;
    r->balance = strtod(field, NULL);
    if (!next_field(&line, ',', field, sizeof field)) return 0;
    r->steps = atoi(field);
    if (!next_field(&line, ',', field, sizeof field) || !read_outcomes(field, &r->f) ||
        !next_field(&line, ',', r->f.lists, sizeof r->f.lists) ||
        !next_field(&line, ',', r->version, sizeof r->version) ||
        !next_field(&line, ',', r->commit, sizeof r->commit) || !next_field(&line, ',', field, 32) ||
        !next_field(&line, ',', compiler, sizeof compiler) || !next_field(&line, ',', kernels, sizeof kernels) ||
        !next_field(&line, ',', threads, sizeof threads))
        return 0;
    snprintf(r->build, sizeof r->build, "%.30s,%s,%s,%s", field, compiler, kernels, threads);
    r->seconds = strtod(line, &end);
    return end != line && *end == '\n';
}

static int keep_row(const row *r) {
    size_t *last = &last_row[find_world(r->world) - worlds][find_arm(r->arm) - arms];
    if (n_rows == room_for_rows) {
        row *more = (row *)realloc(rows, (2 * n_rows + 64) * sizeof *rows);
        if (more == NULL) return complain("rows", "out of memory");
        rows = more;
        room_for_rows = 2 * n_rows + 64;
    }
    rows[n_rows] = *r;
    rows[n_rows].next = *last;
    *last = ++n_rows;
    return 0;
}

/* NULL if r may be in a file with rows [first, n_rows), else what that would mix. */
static const char *mixes(const row *r, size_t first) {
    if (n_rows > first && strcmp(rows[first].build, r->build) != 0) return "mixes rows of two builds";
    for (size_t i = n_rows; i > first; i--)
        if (strcmp(rows[i - 1].world, r->world) == 0)
            return rows[i - 1].checksum == r->checksum ? NULL : "mixes rows of different data";
    return NULL;
}

/* Reads a part's rows; running 1: removes an incomplete last line, which a stopped run has left.
   Rows of two builds, or of one world with two texts, in one file are refused. */
static int read_part(const char *part, int running) {
    static char line[LINE];
    static row r;
    const char *path = path_of(part);
    size_t first = n_rows;
    long good = 0;
    int failed = 0, any, whole;
    FILE *f = fopen(path, "rb");
    if (f == NULL) return 0;
    any = fgets(line, sizeof line, f) != NULL;
    whole = any && strcmp(line, COLUMNS) == 0;
    if (any && !whole && (strchr(line, '\n') != NULL || strncmp(COLUMNS, line, strlen(line)) != 0))
        failed = complain(path, "is not a file of rows"); /* else empty, or the names are incomplete */
    while (!failed && whole && (good = ftell(f)) >= 0 && fgets(line, sizeof line, f) != NULL) {
        if (strchr(line, '\n') == NULL) break; /* incomplete */
        if (!read_row(line, &r)) failed = complain(path, line);
        else if (mixes(&r, first) != NULL) failed = complain(path, mixes(&r, first));
        else {
            r.file = part;
            failed = keep_row(&r);
        }
    }
    if (!failed && !feof(f)) failed = complain(path, "cannot be read");
    fclose(f);
#ifndef _WIN32
    if (!failed && running && truncate(path, good) != 0) failed = complain(path, "cannot be written");
#endif
    return failed;
}

/* Appends a line in one write, so that the lines of parallel processes do not mix. */
static int append_line(const char *part, const char *line) {
    static char buffer[2 * LINE];
    const char *path = path_of(part);
    FILE *f = fopen(path, "ab");
    int good = f != NULL;
    if (!good) return complain(path, "cannot be written");
    setvbuf(f, buffer, _IOFBF, sizeof buffer);
    if (ftell(f) == 0) good = fputs(COLUMNS, f) >= 0;
    good = fputs(line, f) >= 0 && good;
    good = fclose(f) == 0 && good;
    return good ? 0 : complain(path, "cannot be written");
}

static int append_row(const char *part, const row *r) {
    static char line[2 * LINE];
    row_line(r, line);
    return append_line(part, line);
}

/* ---- jobs ---- */

static int listed(const char *names, const char *name) {
    size_t length = strlen(name);
    for (const char *at = names; (at = strstr(at, name)) != NULL; at += length)
        if ((at == names || at[-1] == ',') && (at[length] == ',' || at[length] == '\0')) return 1;
    return 0;
}

static int is_wanted(const claim *c) {
    const world *w = find_world(c->world);
    if (options.only == NULL) return strcmp(w->part, "worlds") == 0;
    return listed(options.only, c->id) || listed(options.only, c->world) || listed(options.only, w->part);
}

/* The numbers of a list "0.003 0.01". */
static int read_list(const char *text, double *out) {
    int n = 0;
    for (char *end; n < 8 && *text != '\0'; n++, text = end) out[n] = strtod(text, &end);
    return n;
}

/* Whether balance changes the run: the arm uses it, or other layers do. */
static int has_balance(const world *w, const arm *a) {
    return strstr(a->settings, "@balance") != NULL || w->kind == ANISOTROPY || w->kind == PATCHES ||
           (w->kind == TEXT && strpbrk(a->where, ".") != NULL);
}

static uint64_t job_checksum(const job *j) {
    if (j->w->kind == TEXT) return texts_checksum(j->w->strength > 0);
    return j->w->kind == DIGITS || j->w->kind == PATCHES ? digits_checksum() : 0;
}

static const row *find_row(const job *j) {
    char router[2 * TEXT_ROOM + 80];
    uint64_t checksum = job_checksum(j);
    arm_router(j, router);
    for (size_t i = last_row[j->w - worlds][j->a - arms]; i > 0; i = rows[i - 1].next) {
        const row *r = &rows[i - 1];
        if (r->seed == j->seed && (r->stage[0] == 't') == j->tuning && fabs(r->rate - j->rate) < 1e-9 &&
            fabs(r->balance - j->balance) < 1e-9 && r->steps == job_steps(j) && strcmp(r->router, router) == 0 &&
            (checksum == 0 || r->checksum == checksum))
            return r;
    }
    return NULL;
}

static job jobs[MAX_JOBS];
static int n_jobs;

static void want(const job *j) {
    for (int i = 0; i < n_jobs; i++)
        if (memcmp(&jobs[i], j, sizeof *j) == 0) return;
    if (n_jobs < MAX_JOBS && find_row(j) == NULL) jobs[n_jobs++] = *j;
}

static job make_job(const world *w, const arm *a, int tuning, int seed, double rate, double balance) {
    job j;
    memset(&j, 0, sizeof j); /* compared as bytes */
    j.w = w;
    j.a = a;
    j.tuning = tuning;
    j.seed = seed;
    j.rate = rate;
    j.balance = balance;
    return j;
}

/* Sets *best to the pair of the grid with the least mean loss over the tuning seeds. Returns 0 if
   rows are missing; add: adds their jobs. */
static int tuned(const world *w, const arm *a, int add, job *best) {
    double rate[8], balance[8], least = HUGE_VAL;
    int n_rates = read_list(w->rates, rate), n_balances = read_list(w->balances, balance);
    int whole = 1;
    if (!has_balance(w, a)) n_balances = 1;
    for (int i = 0; i < n_rates * n_balances; i++) {
        double sum = 0;
        for (int s = 0; s < w->tuning_seeds; s++) {
            job j = make_job(w, a, 1, FIRST_TUNING + s, rate[i / n_balances], balance[i % n_balances]);
            const row *r = find_row(&j);
            if (r == NULL && add) want(&j);
            whole = whole && r != NULL;
            sum += r != NULL ? r->f.value[LOSS] / w->tuning_seeds : 0;
        }
        if (whole && sum < least) {
            least = sum;
            *best = make_job(w, a, 0, 1, rate[i / n_balances], balance[i % n_balances]);
        }
    }
    return whole && least < HUGE_VAL;
}

static int seeds_of(const world *w) { return options.seeds > 0 ? options.seeds : w->seeds; }
static int seed_of(int i) { return (options.unseen ? 5001 : 1) + i; }

static void want_arm(const world *w, const char *name, int judging) {
    job j;
    if (!tuned(w, find_arm(name), !judging, &j) || !judging) return;
    for (int s = 0; s < seeds_of(w); s++) {
        j.seed = seed_of(s);
        want(&j);
    }
}

/* ---- running ---- */

static moe_status run_job(const job *j, row *r, moe_error *error) {
    clock_t start = clock();
    moe_status status;
    memset(r, 0, sizeof *r);
    for (int i = 0; i < N_OUTCOMES; i++) r->f.value[i] = MISSING;
    snprintf(r->world, sizeof r->world, "%s", j->w->name);
    snprintf(r->arm, sizeof r->arm, "%s", j->a->name);
    snprintf(r->stage, sizeof r->stage, "%s", j->tuning ? "tune" : "judge");
    snprintf(r->version, sizeof r->version, "%d.%d.%d", MOE_VERSION_MAJOR, MOE_VERSION_MINOR, MOE_VERSION_PATCH);
    snprintf(r->build, sizeof r->build, "%s", this_build(part_of_job(j)));
    snprintf(r->commit, sizeof r->commit, "%s", BENCH_TEXT(BENCH_COMMIT));
    arm_router(j, r->router);
    r->checksum = job_checksum(j);
    r->seed = j->seed;
    r->steps = job_steps(j);
    r->rate = j->rate;
    r->balance = j->balance;
    if (j->w->kind == TEXT) status = run_text(j, &r->f, error);
    else if (j->w->kind == DIGITS || j->w->kind == PATCHES) status = run_digits(j, &r->f, error);
    else status = run_planted(j, &r->f, error);
    if (status == MOE_ERR_NONFINITE) { /* the rate is too high: counts as the worst result */
        r->f.value[LOSS] = HUGE_VAL;
        status = MOE_OK;
    }
    r->seconds = world_seconds(start);
    return status;
}

static int run_and_keep(const job *j) {
    static row r;
    moe_error error = {MOE_OK, ""};
    moe_status status = run_job(j, &r, &error);
    if (status == MOE_ERR_STOPPED) return 1;
    if (status != MOE_OK) {
        fprintf(stderr, "\nbench: %s, %s, seed %d: %s\n", j->w->name, j->a->name, j->seed,
                *error.message != '\0' ? error.message : moe_status_text(status));
        return 1;
    }
    return append_row(part_of_job(j), &r);
}

static time_t started;
static int out_of_time(void) {
    return bench_stopped != 0 || (options.minutes > 0 && difftime(time(NULL), started) > 60 * options.minutes);
}

/* --minutes as a signal: a run on text, which may take minutes, stops with a checkpoint. */
static void limit_time(void) {
#ifndef _WIN32
    if (options.minutes <= 0) return;
    signal(SIGALRM, on_signal);
    (void)alarm(1 + (unsigned)(60 * options.minutes));
#endif
}

/* On a terminal a line that the next one overwrites; in a log a line at most every ten seconds. */
static void tell(int done, const char *what, time_t begin) {
    static time_t told;
    time_t now = time(NULL);
    double left = done > 0 ? difftime(now, begin) / done * (n_jobs - done) : 0;
    if (!isatty(2) && now - told < 10 && done < n_jobs) return;
    told = now;
    fprintf(stderr, "%s%d of %d runs, %d:%02d:%02d left, %s%s", isatty(2) ? "\r\033[K" : "", done, n_jobs,
            (int)left / 3600, (int)left / 60 % 60, (int)left % 60, what, isatty(2) && done < n_jobs ? "" : "\n");
}

/* Runs the jobs whose indices arrive on pipe `in`; writes the index of each when done to `out`. */
static int work_off(int in, int out) {
    int number, failed = 0;
    while (!out_of_time() && read(in, &number, sizeof number) == (long)sizeof number) {
        if (run_and_keep(&jobs[number])) failed = 1;
        else if (write(out, &number, sizeof number) != (long)sizeof number) return 1;
    }
    return failed;
}

/* New rows must not mix with those of another build or text. */
static int check_part(const job *j, const char *part) {
    for (size_t k = 0; k < n_rows; k++) {
        if (strcmp(rows[k].file, part) != 0) continue;
        if (strcmp(rows[k].build, this_build(part)) != 0)
            return complain(path_of(part), "has rows of another build; keep new ones elsewhere with --rows");
        if (strcmp(rows[k].world, j->w->name) == 0 && rows[k].checksum != job_checksum(j))
            return complain(path_of(part), "has rows of other data; keep new ones elsewhere with --rows");
    }
    return 0;
}

/* Checks the files of the jobs and creates those that are missing: before long runs, and before
   several processes would each begin the same file. */
static int begin_files(void) {
    for (int i = 0; i < n_jobs; i++) {
        const char *part = part_of_job(&jobs[i]);
        if (i > 0 && strcmp(part, part_of_job(&jobs[i - 1])) == 0) continue;
        if (check_part(&jobs[i], part) || append_line(part, "")) return 1;
    }
    return 0;
}

static int run_jobs(void) {
    time_t begin = time(NULL);
    int failed = 0, done = 0;
    if (options.jobs <= 1 || n_jobs <= 1) {
        for (int i = 0; i < n_jobs && !out_of_time(); i++) {
            tell(i, jobs[i].w->name, begin);
            if (run_and_keep(&jobs[i])) failed = 1;
            else done++;
        }
    }
#ifndef _WIN32
    else {
        int left_of[2], over[2], number, told = 0;
        long got;
        pid_t worker[MAX_SEEDS];
        if (pipe(left_of) != 0 || pipe(over) != 0) return complain("--jobs", "no pipe");
        for (int p = 0; p < options.jobs; p++) {
            if ((worker[p] = fork()) != 0) continue;
            close(left_of[1]);
            close(over[0]);
            _exit(work_off(left_of[0], over[1]));
        }
        close(left_of[0]);
        close(over[1]);
        signal(SIGPIPE, SIG_IGN);
        for (int i = 0; i < n_jobs; i++) /* a pipe holds them all: 8,192 numbers are 32 kB */
            if (write(left_of[1], &i, sizeof i) != (long)sizeof i) failed = 1;
        close(left_of[1]);
        while ((got = read(over[0], &number, sizeof number)) != 0) { /* -1: a signal */
            if (got == (long)sizeof number) tell(++done, jobs[number].w->name, begin);
            else if (bench_stopped == 0 || told) break;
            for (int p = 0; p < options.jobs && bench_stopped != 0 && !told; p++)
                if (worker[p] > 0) kill(worker[p], SIGTERM); /* it may have come to this process alone */
            told = bench_stopped != 0;
        }
        close(over[0]);
        for (int status; wait(&status) > 0;) failed |= status != 0;
    }
#endif
    if (done < n_jobs || failed)
        fprintf(stderr, "\nbench: %d of %d runs; the same command runs the others\n", done, n_jobs);
    return failed || done < n_jobs;
}

static int read_rows(int running) {
    static const char *const parts[] = {"worlds", "cost", "text", "short", "words", "scaling", "digits"};
    forget_rows();
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const char *of_world = strcmp(parts[i], "cost") == 0 ? "worlds" : parts[i];
        int needed = !running;
        for (int c = 0; c < N_CLAIMS; c++)
            needed = needed || (is_wanted(&claims[c]) && strcmp(find_world(claims[c].world)->part, of_world) == 0);
        if (needed && read_part(parts[i], running)) return 1;
    }
    return 0;
}

/* ---- judging ---- */

/* The outcome of an arm for each seed after `steps` steps (0: the world's); returns the number of
   leading seeds that have it. */
static int values_with(const world *w, const char *name, int outcome, int steps, double *out) {
    job j;
    int n = 0;
    if (!tuned(w, find_arm(name), 0, &j)) return 0;
    j.steps = steps;
    for (const row *r; n < seeds_of(w) && n < MAX_SEEDS; n++) {
        j.seed = seed_of(n);
        if ((r = find_row(&j)) == NULL) break;
        out[n] = r->f.value[outcome];
    }
    return n;
}

static int values_of(const world *w, const char *name, int outcome, double *out) {
    return values_with(w, name, outcome, 0, out);
}

/* Reads a list of a run, "name=1:2:3"; returns how many numbers it has. */
static int list_of(const row *r, const char *name, double *out, int most) {
    const char *at = strstr(r->f.lists, name);
    int n = 0;
    for (char *end; at != NULL && n < most && (*(at += n == 0 ? strlen(name) : 0) == '=' || *at == ':'); n++, at = end)
        out[n] = strtod(at + 1, &end);
    return n;
}

/* The interval over blocks of the test text, of the mean over seeds. */
static void blocks_of(const claim *c, int seeds, judgement *g) {
    double d[MAX_BLOCKS] = {0}, a[MAX_BLOCKS], b[MAX_BLOCKS];
    job ja, jb;
    int n = 0;
    g->block_low = g->block_high = MISSING;
    if (c->outcome != LOSS || !tuned(find_world(c->world), find_arm(c->arm), 0, &ja) ||
        !tuned(find_world(c->world), find_arm(c->baseline), 0, &jb))
        return;
    for (int s = 0; s < seeds; s++) {
        const row *ra, *rb;
        ja.seed = jb.seed = seed_of(s);
        ra = find_row(&ja);
        rb = find_row(&jb);
        n = list_of(ra, "blocks", a, MAX_BLOCKS);
        if (n < 2 || list_of(rb, "blocks", b, MAX_BLOCKS) != n) return;
        for (int i = 0; i < n; i++) d[i] += (a[i] - b[i]) / seeds;
    }
    if (n > 1) judge_blocks(d, n, &g->block_low, &g->block_high);
}

static void judge_all(judgement *g) {
    for (int c = 0; c < N_CLAIMS; c++) {
        double a[MAX_SEEDS], b[MAX_SEEDS];
        const world *w = find_world(claims[c].world);
        int n = values_of(w, claims[c].arm, claims[c].outcome, a);
        int of_baseline = values_of(w, claims[c].baseline, claims[c].outcome, b);
        n = of_baseline < n ? of_baseline : n;
        memset(&g[c], 0, sizeof g[c]);
        if (n < seeds_of(w)) n = 0; /* judged once, when all seeds are there */
        g[c].r = statistics_paired((size_t)n, a, b);
        g[c].arm = statistics_paired((size_t)n, a, NULL).mean;
        g[c].baseline = statistics_paired((size_t)n, b, NULL).mean;
        g[c].p = g[c].holm = isfinite(g[c].r.mean) ? g[c].r.p : 1;
        g[c].level = 0.05;
        if (n > 1) blocks_of(&claims[c], n, &g[c]);
    }
    for (int family = 0; family < 2; family++) { /* planted worlds, natural data */
        double p[N_CLAIMS], adjusted[N_CLAIMS];
        int place[N_CLAIMS];
        size_t m = 0, accepted = 0;
        for (int c = 0; c < N_CLAIMS; c++)
            if (claims[c].kind == PRIMARY && (strcmp(find_world(claims[c].world)->part, "worlds") == 0) == !family) {
                p[m] = g[c].p; /* 1 if not run yet: still counts in the correction */
                place[m++] = c;
            }
        statistics_holm(m, p, adjusted);
        for (size_t i = 0; i < m; i++) accepted += adjusted[i] < 0.05;
        for (size_t i = 0; i < m; i++) g[place[i]].holm = adjusted[i];
        for (size_t i = 0; i < m; i++) /* of the next one to be accepted */
            if (adjusted[i] >= 0.05) g[place[i]].level = 0.05 / (double)(m - accepted);
    }
    for (int c = 0; c < N_CLAIMS; c++) {
        const claim *k = &claims[c];
        g[c].verdict = judge(&g[c].r, k->sign, k->margin, k->papers, k->kind == KEEPS, g[c].holm);
        if (g[c].verdict == UNDERPOWERED && k->kind != KEEPS)
            g[c].seeds = judge_seeds(g[c].r.error * sqrt((double)g[c].r.n), k->margin, g[c].level);
    }
}

/* ---- tables ---- */

static moe_buffer printed;
static moe_stream printer;

static void print(const char *format, ...) {
    char text[2000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    (void)printer.write(printer.ctx, text, strlen(text));
}

static moe_status write_buffer(void *ctx, moe_stream *stream) {
    const moe_buffer *b = (const moe_buffer *)ctx;
    return stream->write(stream->ctx, b->data, b->size);
}

static void print_verdict(const claim *c, const judgement *g) {
    int kept = g->verdict == OPPOSITE || g->verdict == EXCLUDED || g->verdict == NO_EFFECT;
    print("%s", verdict_names[g->verdict]);
    if (g->verdict == REPRODUCED && c->kind != KEEPS && fmax(c->sign * g->r.low, c->sign * g->r.high) < c->margin)
        print(", smaller than the margin");
    if (g->verdict == UNDERPOWERED && g->seeds > 0) print(" (%d seeds would decide)", g->seeds);
    if (c->kind == FAILS && g->verdict != NOT_RUN)
        print(", %s", kept ? "as it must" : g->verdict == REPRODUCED ? "**though it must not be**" : "open");
}

/* The block of a claim: of the planted worlds, of sizes of models, or of natural data. */
static const char *section_of(const claim *c) {
    const char *part = find_world(c->world)->part;
    return strcmp(part, "worlds") == 0 || strcmp(part, "scaling") == 0 ? part : "natural";
}

/* The claims of a block that have been run; returns 0 if there are none. */
static int print_claims(const judgement *g, const char *block) {
    static const char *const kinds[] = {"**primary**", "", "control", "keeps"};
    const char *paper = "";
    for (int c = 0; c < N_CLAIMS; c++) {
        const claim *k = &claims[c];
        int places = outcomes[k->outcome].decimals;
        if (strcmp(section_of(k), block) != 0 || g[c].verdict == NOT_RUN) continue;
        if (*paper == '\0')
            print("| claim | world | outcome | arm | baseline | difference | margin | p | verdict |\n"
                  "|---|---|---|--:|--:|--:|--:|--:|---|\n");
        if (strcmp(paper, k->paper) != 0) print("| *%s* | | | | | | | | |\n", k->paper);
        paper = k->paper;
        if (g[c].verdict == NO_NUMBER) {
            print("| %s | %s | %s | | | | | | %s |\n", k->text, k->world, outcomes[k->outcome].name,
                  verdict_names[NO_NUMBER]);
            continue;
        }
        print("| %s%s%s | %s | %s | %.*f | %.*f | %+.*f [%.*f, %.*f]", k->text, *kinds[k->kind] != '\0' ? "; " : "",
              kinds[k->kind], k->world, outcomes[k->outcome].name, places, g[c].arm, places, g[c].baseline, places,
              g[c].r.mean, places, g[c].r.low, places, g[c].r.high);
        if (!isnan(g[c].block_low)) print("; blocks [%.*f, %.*f]", places, g[c].block_low, places, g[c].block_high);
        print(" | %s%g%s | %.2g | ", k->sign > 0 ? "+" : "-", k->margin, k->papers ? " (paper)" : "", g[c].holm);
        print_verdict(k, &g[c]);
        print(" |\n");
    }
    return *paper != '\0';
}

/* The claims that have been declared but not run, but for those of scaling, whose block says so. */
static void print_missing(const judgement *g) {
    int n = 0;
    for (int c = 0; c < N_CLAIMS; c++) {
        if (g[c].verdict != NOT_RUN || strcmp(section_of(&claims[c]), "scaling") == 0) continue;
        if (n++ == 0) print("| claim | paper | world | comparison | verdict |\n|---|---|---|---|---|\n");
        print("| %s | %s %s | %s | %s against %s | not run yet |\n", claims[c].text, claims[c].paper, claims[c].place,
              claims[c].world, claims[c].arm, claims[c].baseline);
    }
    if (n == 0) print("None: every claim has rows.\n");
}

static int is_arm_of(const arm *a, const world *w) {
    if (strcmp(a->name, "oracle") == 0) return 1;
    for (int c = 0; c < N_CLAIMS; c++)
        if (strcmp(claims[c].world, w->name) == 0 &&
            (strcmp(claims[c].arm, a->name) == 0 || strcmp(claims[c].baseline, a->name) == 0))
            return 1;
    return 0;
}

/* Means of every arm in every world, and of the oracle. */
static void print_arms(void) {
    static const int shown[] = {LOSS, LOG_LOSS, RECOVERY, INFORMATION, FLIP, ENTROPY, LOAD_MAX, ROWS, MS};
    enum { SHOWN = sizeof shown / sizeof shown[0] };
    print("| world | router | rate | balance | loss | log_loss | recovery | information | flip | entropy | load_max "
          "| rows | ms |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n");
    for (int w = 0; w < N_WORLDS; w++)
        for (int i = 0; i < N_ARMS; i++) {
            double v[MAX_SEEDS];
            job best;
            int n = is_arm_of(&arms[i], &worlds[w]) ? values_of(&worlds[w], arms[i].name, LOSS, v) : 0;
            if (n < seeds_of(&worlds[w]) || !tuned(&worlds[w], &arms[i], 0, &best)) continue;
            print("| %s | %s | %g | ", worlds[w].name, arms[i].name, best.rate);
            if (has_balance(&worlds[w], &arms[i])) print("%g |", best.balance);
            else print("|");
            for (int m = 0; m < SHOWN; m++) {
                double mean = statistics_paired((size_t)values_of(&worlds[w], arms[i].name, shown[m], v), v, NULL).mean;
                if (isnan(mean)) print(" |");
                else print(" %.*f |", outcomes[shown[m]].decimals, mean);
            }
            print("\n");
        }
}

static void print_builds(void) {
    print("| rows of | runs | version | commit | build, compiler, kernels, threads | processor hours |\n"
          "|---|--:|---|---|---|--:|\n");
    for (size_t i = 0; i < n_rows; i++) {
        double seconds = 0;
        int n = 0;
        if (i > 0 && strcmp(rows[i - 1].file, rows[i].file) == 0) continue;
        for (size_t k = 0; k < n_rows; k++)
            if (strcmp(rows[k].file, rows[i].file) == 0) {
                seconds += rows[k].seconds;
                n++;
            }
        print("| %s | %d | %s | %s | %s | %.1f |\n", rows[i].file, n, rows[i].version, rows[i].commit, rows[i].build,
              seconds / 3600);
    }
}

#include "cost.h"
#include "scaling.h"

/* Runs the missing jobs: the grid, the judging seeds with its best pair, the runs at equal cost. */
static int run_missing(void) {
    static char folder[1100], build[96];
    started = time(NULL);
    limit_time();
    snprintf(build, sizeof build, "%s", this_build("text"));
    text_program = build;
    snprintf(folder, sizeof folder, "%s", path_of("text"));
    *strrchr(folder, '/') = '\0';
    text_checkpoints = folder;
    for (int stage = 0; stage < 3; stage++) {
        n_jobs = 0;
        if (read_rows(1) || (stage == 2 && read_times())) return 1;
        for (int c = 0; c < N_CLAIMS; c++) {
            const world *w = find_world(claims[c].world);
            if (!is_wanted(&claims[c])) continue;
            if (w->kind == TEXT && texts_read(w->strength > 0, options.text, options.test)) return 1;
            if ((w->kind == DIGITS || w->kind == PATCHES) && digits_read()) return 1;
            if (stage == 2) {
                if (is_on_cost(&claims[c])) want_cost(&claims[c]);
                continue;
            }
            want_arm(w, claims[c].arm, stage);
            want_arm(w, claims[c].baseline, stage);
            if (strcmp(w->part, "worlds") == 0 && w->kind != TOY && w->kind != MODULES) want_arm(w, "oracle", stage);
        }
        if (n_jobs > 0 && (begin_files() || run_jobs())) return 1;
    }
    return read_rows(1);
}

/* ---- README.md ---- */

/* Blocks of examples/bench/README.md; the last one is in the README.md at the top. */
static const char *const blocks[] = {"worlds",  "cost",    "natural", "scaling",
                                     "missing", "routers", "builds",  "verdicts"};
enum { N_BLOCKS = sizeof blocks / sizeof blocks[0], OWN_BLOCKS = N_BLOCKS - 1 };

/* The claim on natural data beside a primary claim of planted worlds: the paper's primary one, or
   if that has not been run, its first that has. */
static int natural_claim(const judgement *g, int primary) {
    int first = -1;
    for (int c = 0; c < N_CLAIMS; c++) {
        if (strcmp(claims[c].paper, claims[primary].paper) != 0) continue;
        if (strcmp(section_of(&claims[c]), "natural") != 0) continue;
        if (claims[c].kind == PRIMARY && g[c].verdict != NOT_RUN) return c;
        if (first < 0 || (g[first].verdict == NOT_RUN && g[c].verdict != NOT_RUN)) first = c;
    }
    return first;
}

/* The primary claims: what each paper says first, in planted worlds and in natural data. */
static void print_verdicts(const judgement *g) {
    print("| primary claims ([how](examples/bench/README.md)) | planted worlds | digits, text |\n|---|---|---|\n");
    for (int c = 0; c < N_CLAIMS; c++) {
        int n;
        if (claims[c].kind != PRIMARY || strcmp(find_world(claims[c].world)->part, "worlds") != 0) continue;
        n = natural_claim(g, c);
        print("| %s: %s | ", claims[c].paper, claims[c].text);
        print_verdict(&claims[c], &g[c]);
        print(" | ");
        if (n >= 0 && g[n].verdict != NOT_RUN && strcmp(claims[n].text, claims[c].text) != 0)
            print("%s: ", claims[n].text);
        if (n >= 0) print_verdict(&claims[n], &g[n]);
        print(n >= 0 && claims[n].kind != PRIMARY && g[n].verdict != NOT_RUN ? " (secondary) |\n" : " |\n");
    }
}

static void print_block(const char *name, const judgement *g) {
    if (strcmp(name, "worlds") == 0 || strcmp(name, "natural") == 0) (void)print_claims(g, name);
    else if (strcmp(name, "scaling") == 0) {
        if (print_claims(g, name)) print("\n");
        print_laws();
    } else if (strcmp(name, "missing") == 0) print_missing(g);
    else if (strcmp(name, "routers") == 0) print_arms();
    else if (strcmp(name, "cost") == 0) print_costs(g);
    else if (strcmp(name, "verdicts") == 0) print_verdicts(g);
    else print_builds();
}

/* Replaces blocks [first, last) of a page, between "<!-- rows: NAME -->" and "<!-- end -->". */
static int make_page(const moe_buffer *page, const judgement *g, int first, int last, moe_buffer *out) {
    const char *at = (const char *)page->data, *end = at + page->size;
    printed = (moe_buffer){0};
    printer = moe_buffer_stream(&printed);
    for (int i = first; i < last; i++) {
        char open[64];
        const char *from, *to;
        snprintf(open, sizeof open, "<!-- rows: %s -->\n", blocks[i]);
        from = strstr(at, open);
        to = from != NULL ? strstr(from, "<!-- end -->") : NULL;
        if (to == NULL) return complain("README.md", open);
        from += strlen(open);
        (void)printer.write(printer.ctx, at, (size_t)(from - at));
        if (i < OWN_BLOCKS) print("\n");
        print_block(blocks[i], g);
        if (i < OWN_BLOCKS) print("\n");
        at = to;
    }
    (void)printer.write(printer.ctx, at, (size_t)(end - at));
    *out = printed;
    return 0;
}

/* Every claim that was run as a line: the difference in margins, the prediction to the right. */
static moe_status write_figure(const judgement *g, moe_stream *stream) {
    moe_status status;
    static const char *const colors[NOT_RUN] = {"#15803d", "#c2410c", "#a16207", "#0b62c4", "#777"};
    enum { STEP = 15, ZERO = 560, UNIT = 90, WIDE = 860 };
    int y = 50, shown = 0;
    printed = (moe_buffer){0};
    printer = moe_buffer_stream(&printed);
    for (int c = 0; c < N_CLAIMS; c++) shown += g[c].verdict < NOT_RUN;
    print("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\" "
          "font-size=\"11\">\n<style>text{fill:#222}.b{fill:#fff}@media(prefers-color-scheme:dark){text{fill:#ddd}"
          ".b{fill:#161616}}</style>\n<rect class=\"b\" width=\"%d\" height=\"%d\"/>\n",
          WIDE, 60 + STEP * shown, WIDE, 60 + STEP * shown);
    print("<text x=\"10\" y=\"20\" font-size=\"14\">Difference to the baseline in margins, the prediction to the "
          "right; 95 %% intervals</text>\n");
    for (int m = -2; m <= 3; m++)
        print("<path d=\"M%d 34v%d\" stroke=\"#999\" opacity=\"%s\"/><text x=\"%d\" y=\"32\" "
              "text-anchor=\"middle\">%d</text>\n",
              ZERO + m * UNIT, STEP * shown + 10, m == 0 ? "1" : ".3", ZERO + m * UNIT, m);
    for (int c = 0; c < N_CLAIMS; c++) {
        double unit = UNIT * claims[c].sign / claims[c].margin;
        double low = g[c].r.low * unit, high = g[c].r.high * unit;
        double middle = fmin(fmax(g[c].r.mean * unit, -200), 290);
        if (g[c].verdict >= NOT_RUN) continue;
        print("<text x=\"330\" y=\"%d\" text-anchor=\"end\">%s</text><g stroke=\"%s\" fill=\"%s\"><path "
              "d=\"M%.1f %dH%.1f\"/><circle cx=\"%.1f\" cy=\"%d\" r=\"3\"/></g>\n",
              y + 4, claims[c].id, colors[g[c].verdict], colors[g[c].verdict],
              ZERO + fmin(fmax(fmin(low, high), -200), 290), y, ZERO + fmin(fmax(fmax(low, high), -200), 290),
              ZERO + middle, y);
        y += STEP;
    }
    print("</svg>\n");
    status = stream->write(stream->ctx, printed.data, printed.size);
    moe_buffer_free(&printed);
    return status;
}

static int same_bytes(const moe_buffer *a, const moe_buffer *b) {
    return a->size == b->size && memcmp(a->data, b->data, a->size) == 0;
}

/* Writes a file, or with --verify compares it with the existing one. */
static int keep_or_verify(const char *path, const moe_buffer *kept, moe_buffer *made) {
    moe_error error;
    if (options.verify) {
        int same = same_bytes(kept, made);
        printf("%s %s\n", path, same ? "matches the rows" : "DIFFERS from the rows");
        return !same;
    }
    return moe_file_replace(path, write_buffer, made, &error) != MOE_OK ? complain(path, error.message) : 0;
}

static int do_one_page(const judgement *g, const char *name, int first, int last) {
    char path[1024];
    moe_buffer page = {0}, made = {0};
    moe_error error;
    int failed;
    snprintf(path, sizeof path, "%s", example_file(name));
    if (moe_file_read(path, &page, &error) != MOE_OK || moe_buffer_stream(&page).write(&page, "", 1) != MOE_OK)
        return complain(path, error.message); /* now it ends with 0, for strstr */
    page.size--;
    failed = make_page(&page, g, first, last, &made) || keep_or_verify(path, &page, &made);
    moe_buffer_free(&page);
    moe_buffer_free(&made);
    return failed;
}

/* --write and --verify: the pages and the figure. */
static int do_page(judgement *g) {
    char figure[1024];
    moe_buffer kept = {0}, drawn = {0};
    moe_stream drawing = moe_buffer_stream(&drawn);
    int failed = do_one_page(g, "bench/README.md", 0, OWN_BLOCKS) != 0;
    failed |= do_one_page(g, "../README.md", OWN_BLOCKS, N_BLOCKS) != 0;
    snprintf(figure, sizeof figure, "%s", example_file("bench/claims.svg"));
    (void)moe_file_read(figure, &kept, NULL);
    failed |= write_figure(g, &drawing) != MOE_OK || keep_or_verify(figure, &kept, &drawn) != 0;
    moe_buffer_free(&kept);
    moe_buffer_free(&drawn);
    return failed;
}

/* ---- report: curves with bands ---- */

static void report_curves(const world *w) {
    enum { TIMES = WORLD_TIMES };
    moe_figure *f;
    const char **names = (const char **)report_grab(3 * N_ARMS, sizeof *names);
    double *values = (double *)report_grab(3 * N_ARMS * TIMES, sizeof *values);
    size_t n_lines = 0;
    for (int a = 0; a < N_ARMS; a++) {
        double curve[MAX_SEEDS][TIMES], at[MAX_SEEDS];
        int n = 0, points = 0;
        job best;
        if (!is_arm_of(&arms[a], w) || !tuned(w, &arms[a], 0, &best)) continue;
        for (const row *r; n < seeds_of(w); n++) {
            best.seed = seed_of(n);
            if ((r = find_row(&best)) == NULL || (points = list_of(r, "curve", curve[n], TIMES)) < TIMES) break;
        }
        if (n < 2 || points < TIMES) continue;
        for (int t = 0; t < TIMES; t++) {
            statistics_result r;
            for (int s = 0; s < n; s++) at[s] = curve[s][t];
            r = statistics_paired((size_t)n, at, NULL);
            values[n_lines * TIMES + (size_t)t] = r.mean;
            values[(n_lines + 1) * TIMES + (size_t)t] = r.low;
            values[(n_lines + 2) * TIMES + (size_t)t] = r.high;
        }
        names[n_lines] = arms[a].name;
        names[n_lines + 1] = names[n_lines + 2] = "its 95 % band";
        n_lines += 3;
    }
    if (n_lines == 0) return;
    f = report_add(MOE_FIGURE_LINES, w->name, n_lines, TIMES);
    f->values = values;
    f->row_names = names;
    f->caption = w->about;
    f->value_label = w->kind == TEXT ? "loss, nats per token" : "ln of the squared error";
    f->column_label = "tenth of the steps";
}

/* ---- command line ---- */

static void print_list(void) {
    for (int i = 0; i < N_CLAIMS; i++)
        printf("claim %-28s %s (%s%s%s): %s, %s against %s, %s %s by %g\n", claims[i].id, claims[i].text,
               claims[i].paper, *claims[i].place != '\0' ? ", " : "", claims[i].place, claims[i].world, claims[i].arm,
               claims[i].baseline, outcomes[claims[i].outcome].name, claims[i].sign > 0 ? "up" : "down",
               claims[i].margin);
    for (int i = 0; i < LAW_ARMS; i++)
        printf("law of %s: its losses at widths 12, 20 and 32 predict that at 48; interval up to +-%g\n", law_arms[i],
               LAW_MARGIN);
    printf("trend of %s minus %s: down by %g per doubling of the width\n", law_arms[1], law_arms[0], TREND_MARGIN);
    for (int i = 0; i < N_WORLDS; i++) printf("world %-20s %s\n", worlds[i].name, worlds[i].about);
    for (int i = 0; i < N_ARMS; i++) {
        char text[2 * TEXT_ROOM + 80];
        job j = make_job(&worlds[0], &arms[i], 0, 1, 0, 0.01);
        arm_router(&j, text);
        printf("router %-22s %s\n", arms[i].name, text);
    }
    for (int i = 0; i < N_OUTCOMES; i++) printf("outcome %-16s %s\n", outcomes[i].name, outcomes[i].about);
}

static int read_number(const char *name, const char *text, int whole, double least, double most, double *out) {
    char *end;
    *out = strtod(text, &end);
    if (*text != '\0' && *end == '\0' && *out >= least && *out <= most && !(whole && floor(*out) < *out)) return 0;
    fprintf(stderr, "bench: %s %s: must be %s from %g to %g\n", name, text, whole ? "an integer" : "a number", least,
            most);
    return 1;
}

/* Every word of --only must name something. */
static int check_only(void) {
    const char *at = options.only;
    for (size_t n; at != NULL; at = at[n] == ',' ? at + n + 1 : NULL) {
        char word[80];
        int c = 0;
        n = strcspn(at, ",");
        snprintf(word, sizeof word, "%.*s", (int)(n < sizeof word ? n : sizeof word - 1), at);
        while (c < N_CLAIMS && strcmp(word, claims[c].id) != 0 && strcmp(word, claims[c].world) != 0 &&
               strcmp(word, find_world(claims[c].world)->part) != 0)
            c++;
        if (c == N_CLAIMS) return complain(word, "no such claim, world or part; see --list");
    }
    return 0;
}

/* Options that do not go together. */
static int check_options(void) {
    const int modes = options.list + options.tables + options.write + (options.verify && !options.pictures) +
                      options.check + options.time + options.again + options.pictures;
    if (modes > 1) return complain("two things to do", "one of --list, --tables, --write, ... at a time; see -h");
    if (options.seeds == 1) return complain("--seeds 1", "an interval needs at least 2");
    if ((options.write || options.verify) && (options.seeds > 0 || options.unseen || bench_short))
        return complain("--write and --verify", "the pages have the declared seeds and steps");
    if (bench_short && options.rows == NULL && !options.check && !options.list)
        return complain("--short", "needs --rows FOLDER, another one than that of the published rows");
    return 0;
}

static int read_options(int count, char **words) {
    static const struct {
        const char *name;
        const char **text;
        int *flag, *whole;
        double *real;
    } known[] = {{"--only", &options.only, NULL, NULL, NULL},     {"--rows", &options.rows, NULL, NULL, NULL},
                 {"--text", &options.text, NULL, NULL, NULL},     {"--test", &options.test, NULL, NULL, NULL},
                 {"--report", &report_path, NULL, NULL, NULL},    {"--jobs", NULL, NULL, &options.jobs, NULL},
                 {"--seeds", NULL, NULL, &options.seeds, NULL},   {"--minutes", NULL, NULL, NULL, &options.minutes},
                 {"--unseen", NULL, &options.unseen, NULL, NULL}, {"--short", NULL, &bench_short, NULL, NULL},
                 {"--list", NULL, &options.list, NULL, NULL},     {"--tables", NULL, &options.tables, NULL, NULL},
                 {"--write", NULL, &options.write, NULL, NULL},   {"--verify", NULL, &options.verify, NULL, NULL},
                 {"--check", NULL, &options.check, NULL, NULL},   {"--time", NULL, &options.time, NULL, NULL},
                 {"--again", NULL, &options.again, NULL, NULL},   {"--pictures", NULL, &options.pictures, NULL, NULL}};
    for (int i = 1; i < count; i++) {
        size_t k = 0;
        double number = 0;
        const char *value = i + 1 < count ? words[i + 1] : "";
        if (strcmp(words[i], "-h") == 0 || strcmp(words[i], "--help") == 0)
            exit(fputs(help, stdout) < 0 || fflush(stdout) != 0);
        while (k < sizeof known / sizeof known[0] && strcmp(known[k].name, words[i]) != 0) k++;
        if (k == sizeof known / sizeof known[0]) return complain(words[i], "no such option; see -h");
        if (known[k].flag != NULL) {
            *known[k].flag = 1;
            continue;
        }
        if (*value == '\0') return complain(words[i], "its value is missing; see -h");
        i++;
        if (known[k].text != NULL) *known[k].text = value;
        else if (read_number(words[i - 1], value, known[k].whole != NULL, known[k].whole != NULL ? 1 : 0.01,
                             known[k].whole != NULL ? MAX_SEEDS : 1e6, &number))
            return 1;
        if (known[k].whole != NULL) *known[k].whole = (int)number;
        if (known[k].real != NULL) *known[k].real = number;
    }
    return check_only() || check_options();
}

/* ---- repeating recorded runs ---- */

/* Whether two rows are the same except for time, version, build and commit. */
static int same_row(row *a, row *b) {
    static char lines[2][LINE];
    row *both[2];
    both[0] = a;
    both[1] = b;
    for (int i = 0; i < 2; i++) {
        both[i]->f.value[MS] = MISSING;
        both[i]->seconds = 0;
        strcpy(both[i]->version, "");
        strcpy(both[i]->build, "");
        strcpy(both[i]->commit, "");
        row_line(both[i], lines[i]);
    }
    return strcmp(lines[0], lines[1]) == 0;
}

enum { SAME, DIFFERS, LEFT_OUT, N_AGAIN };

/* The same compiler, kernels and threads. */
static int is_of_this_machine(const row *kept) {
    return strcmp(strchr(kept->build, ','), strchr(this_build("worlds"), ',')) == 0;
}

static int run_again(const job *j, const row *kept) {
    static row now, then;
    moe_error error;
    if (!is_of_this_machine(kept)) return LEFT_OUT;
    then = *kept;
    if ((j->w->kind == DIGITS || j->w->kind == PATCHES) && digits_read()) return LEFT_OUT;
    if (run_job(j, &now, &error) == MOE_OK && same_row(&now, &then)) return SAME;
    if (bench_stopped) return LEFT_OUT;
    printf("%s, %s, seed %d: differs from its row\n", j->w->name, j->a->name, j->seed);
    return DIFFERS;
}

/* Repeats the first judged run of each router in each world but for text (every 0: of one router).
   Rows of another compiler or of other kernels are skipped. */
static int do_again(int every) {
    int found_out[N_AGAIN] = {0, 0, 0};
    if (read_rows(0)) return 1;
    for (int w = 0; w < N_WORLDS; w++)
        for (int a = 0, done = 0; a < N_ARMS && worlds[w].kind != TEXT && (every || !done); a++) {
            job j;
            const row *r = last_row[w][a] > 0 && tuned(&worlds[w], &arms[a], 0, &j) ? find_row(&j) : NULL;
            if (r == NULL) continue;
            done = 1;
            found_out[run_again(&j, r)]++;
            if (bench_stopped) return complain("--again", "stopped");
        }
    printf("%d runs match their rows bit for bit, %d differ, %d are of another compiler or kernels\n", found_out[SAME],
           found_out[DIFFERS], found_out[LEFT_OUT]);
    return found_out[DIFFERS] > 0;
}

#include "pictures.h"
#include "check.h"

static int perform(void) {
    static judgement g[N_CLAIMS];
    int failed = 0;
    if (!options.tables && !options.write && !options.verify) failed = run_missing();
    else if (read_rows(0) || read_times()) return 1;
    judge_all(g);
    if (options.write || options.verify) return do_page(g);
    printer = (moe_stream){stdout, NULL, report_to_screen, NULL};
    for (int i = 0; i < N_BLOCKS && !failed; i++) {
        if (strcmp(blocks[i], "missing") == 0 && !options.tables) continue;
        print("%s%s\n\n", i > 0 ? "\n" : "", blocks[i]);
        print_block(blocks[i], g);
    }
    for (int w = 0; w < N_WORLDS && report_path != NULL; w++) report_curves(&worlds[w]);
    if (report_path != NULL) report_laws();
    failed |= report_write_added("bench", "Claims about routers");
    if (fflush(stdout) != 0 || ferror(stdout)) return complain("the output", "cannot be written");
    return failed;
}

int main(int count, char **words) {
    int failed;
    if (read_options(count, words)) return EXIT_USAGE;
    if ((failed = report_checked("bench")) != 0) return failed;
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    if (options.list) {
        print_list();
        return 0;
    }
    failed = options.check   ? check_all()
             : options.time  ? do_times()
             : options.again ? do_again(1)
             : options.pictures ? do_pictures()
                             : perform();
    free(rows);
    texts_free();
    return failed;
}
