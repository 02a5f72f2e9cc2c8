/* Loss of power and kills while a file is saved, as SQLite's tests simulate them: every write and
   every change of the folder is recorded, and at each point those that no sync has made durable are
   lost, torn or done in another order. What lies at the path must be the old file or the new one,
   whole; after the save the new one.
     cc -std=c99 -O1 -DMOE_NO_SIMD -I. tests/unit/power.c -o power -lm && ./power
   Writes files named power-test* into the current folder and removes them. POSIX systems only. */

#if defined(__unix__) || defined(__APPLE__)
#define _XOPEN_SOURCE 700
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static int disk_open(const char *name, int flags, ...);
static size_t disk_write(const void *from, size_t size, size_t count, FILE *f);
static int disk_flush(FILE *f);
static int disk_close(FILE *f);
static int disk_sync(int file);
static int disk_rename(const char *from, const char *to);
static int disk_remove(const char *name);

#define open(...) disk_open(__VA_ARGS__)
#define fwrite(from, size, count, f) disk_write(from, size, count, f)
#define fflush(f) disk_flush(f)
#define fclose(f) disk_close(f)
#define fsync(file) disk_sync(file)
#define rename(from, to) disk_rename(from, to)
#define remove(name) disk_remove(name)
#define MOE_IMPLEMENTATION
#include "moe.h"
#undef open
#undef fwrite
#undef fflush
#undef fclose
#undef fsync
#undef rename
#undef remove

#include "../test.h"

#include <stdarg.h>

static const char path[] = "power-test.bin", path_beside[] = "power-test.bin.tmp0";

/* ---- the record: what a save asks of the system ---- */

enum { CREATE, WRITE, FLUSH, SYNC, RENAME, REMOVE, SYNC_FOLDER };
enum { MOST_EVENTS = 4000, MOST_BYTES = 1 << 18, BLOCK = 512 };

typedef struct event {
    int kind;
    size_t at, size; /* WRITE: which bytes of the new file */
} event;

static event events[MOST_EVENTS];
static int n_events, recording;
static long kill_at; /* the number of the event, from 1, before which this process ends */
static unsigned char made[MOST_BYTES]; /* the new file */
static size_t n_made;

static void record(int kind, size_t size) {
    if (kill_at > 0 && --kill_at == 0) (void)raise(SIGKILL);
    if (!recording || !CHECK(n_events < MOST_EVENTS)) return;
    events[n_events].kind = kind;
    events[n_events].at = n_made;
    events[n_events].size = size;
    n_events++;
}

static int disk_open(const char *name, int flags, ...) {
    va_list more;
    int mode = 0;
    va_start(more, flags);
    if (flags & O_CREAT) {
        mode = va_arg(more, int);
        record(CREATE, 0);
    }
    va_end(more);
    return open(name, flags, mode);
}

static size_t disk_write(const void *from, size_t size, size_t count, FILE *f) {
    record(WRITE, size * count);
    if (recording && CHECK(n_made + size * count <= MOST_BYTES)) {
        memcpy(made + n_made, from, size * count);
        n_made += size * count;
    }
    return fwrite(from, size, count, f);
}

static int disk_flush(FILE *f) {
    record(FLUSH, 0);
    return fflush(f);
}

static int disk_close(FILE *f) {
    record(FLUSH, 0);
    return fclose(f);
}

static int disk_sync(int file) {
    struct stat is;
    if (fstat(file, &is) != 0) return -1;
    record(S_ISDIR(is.st_mode) ? SYNC_FOLDER : SYNC, 0);
    return fsync(file);
}

static int disk_rename(const char *from, const char *to) {
    CHECK(strcmp(from, path_beside) == 0 && strcmp(to, path) == 0);
    record(RENAME, 0);
    return rename(from, to);
}

static int disk_remove(const char *name) {
    CHECK(strcmp(name, path_beside) == 0);
    record(REMOVE, 0);
    return remove(name);
}

/* ---- what a loss of power leaves ---- */

static uint64_t random_state = 77;

static int random_bit(void) { /* xorshift64 */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (int)(random_state >> 40 & 1);
}

enum { OLD, NEW, NOTHING, DAMAGED };

/* The new file as far as it is on the disk, when the power fails before event `end`. Of what was
   written since the last sync each block is there or not, and the file may be shorter. */
static int torn(int end, int synced) {
    static unsigned char there[MOST_BYTES];
    size_t durable = 0, size = 0, last, at;
    int i;
    for (i = 0; i < end; i++) {
        if (events[i].kind != WRITE) continue;
        size = events[i].at + events[i].size;
        if (i < synced) durable = size;
    }
    memset(there, 0, sizeof there);
    last = durable;
    memcpy(there, made, durable);
    for (at = durable; at < size; at += BLOCK)
        if (random_bit()) {
            const size_t n = size - at < BLOCK ? size - at : (size_t)BLOCK;
            memcpy(there + at, made + at, n);
            last = at + n;
        }
    return last == n_made && memcmp(there, made, last) == 0 ? NEW : DAMAGED;
}

/* What is found at the path after the power failed before event `end`. Changes of the folder since
   its last sync are done or not; were they done in another order, a renaming is there without what
   came before it. */
static int after_failure(int end, int before) {
    int i, at_path = before, folder = 0;
    int flushed = 0, synced = 0;
    for (i = 0; i < end; i++) {
        if (events[i].kind == FLUSH) flushed = i;
        if (events[i].kind == SYNC) synced = flushed;
        if (events[i].kind == SYNC_FOLDER) folder = i;
    }
    for (i = 0; i < end; i++)
        if (events[i].kind == RENAME && (i < folder || random_bit())) at_path = torn(end, synced);
    return at_path;
}

typedef struct outcomes {
    long count[4];     /* at any point */
    long at_end[4];    /* after the save */
} outcomes;

/* Every point of the recorded save many times; without: an event's kind that the disk ignores. */
static outcomes fail_everywhere(int before, int without) {
    outcomes seen;
    int i, k, kept = 0;
    memset(&seen, 0, sizeof seen);
    for (i = 0; i < n_events; i++)
        if (events[i].kind != without) events[kept++] = events[i];
    n_events = kept;
    for (i = 0; i <= n_events; i++)
        for (k = 0; k < (i == n_events ? 400 : 40); k++) {
            const int what = after_failure(i, before);
            seen.count[what]++;
            if (i == n_events) seen.at_end[what]++;
        }
    return seen;
}

/* ---- what is saved ---- */

static moe_net net;
static moe_trainer trainer;

static moe_status write_large(void *ctx, moe_stream *stream) {
    unsigned char bytes[700];
    size_t i, k;
    moe_status status = MOE_OK;
    (void)ctx;
    for (i = 0; i < 40 && status == MOE_OK; i++) {
        for (k = 0; k < sizeof bytes; k++) bytes[k] = (unsigned char)(1 + (i * 31 + k) % 255);
        status = stream->write(stream->ctx, bytes, sizeof bytes);
        if (i == 20 && status == MOE_OK) status = stream->sync(stream->ctx); /* in the middle, too */
    }
    return status;
}

static moe_status save(int what, moe_error *error) {
    if (what == 0) return moe_file_replace(path, write_large, NULL, error);
    if (what == 1) return moe_net_save(&net, path, error);
    if (what == 2) return moe_layer_save(&net.modules[1].layer, path, error);
    return moe_trainer_save(&trainer, path, error);
}

static int is_there(const char *name) {
    struct stat is;
    return stat(name, &is) == 0;
}

static void put_old(void) {
    FILE *f = fopen(path, "wb");
    if (f == NULL || fputs("old", f) < 0 || fclose(f) != 0) exit(2);
}

/* The file at path is what the record says. */
static int is_new(void) {
    moe_buffer b;
    int good;
    memset(&b, 0, sizeof b);
    good = moe_file_read(path, &b, NULL) == MOE_OK && b.size == n_made && memcmp(b.data, made, n_made) == 0;
    moe_buffer_free(&b);
    return good;
}

static void record_save(int what, int before) {
    moe_error error;
    moe_status status;
    remove(path);
    if (before == OLD) put_old();
    n_events = 0;
    n_made = 0;
    recording = 1;
    status = save(what, &error);
    recording = 0;
    CHECK(status == MOE_OK && n_made > 3 * BLOCK && is_new() && !is_there(path_beside));
}

static void test_power(void) {
    int what, k;
    for (what = 0; what < 4; what++)
        for (k = 0; k < 2; k++) {
            const int before = k == 0 ? OLD : NOTHING;
            outcomes seen;
            record_save(what, before);
            seen = fail_everywhere(before, -1);
            CHECKF(seen.count[DAMAGED] == 0 && seen.count[OLD + NOTHING - before] == 0, "%d %d", what, k);
            CHECK(seen.count[before] > 0 && seen.count[NEW] > 400);
            CHECK(seen.at_end[NEW] == 400, "durable when the call returns");
            record_save(what, before);
            CHECK(fail_everywhere(before, SYNC).count[DAMAGED] > 0, "a disk without sync damages the file");
            record_save(what, before);
            CHECK(fail_everywhere(before, FLUSH).count[DAMAGED] > 0, "nor may the buffer be forgotten");
            record_save(what, before);
            CHECK(fail_everywhere(before, SYNC_FOLDER).at_end[before] > 0, "without the folder's the old one is back");
        }
}

/* Killed at every event, without ever tidying up; and then a save that leaves nothing else. */
static void test_kills(void) {
    moe_error error;
    int what, killed = 0;
    for (what = 0; what < 4; what++) {
        int at, end, status = 0, left = 0;
        record_save(what, OLD);
        end = n_events;
        put_old();
        for (at = 1; at <= end + 1 || killed < 150; at++) {
            const pid_t child = fork();
            moe_buffer b;
            if (child == 0) {
                kill_at = at <= end ? at : at % end + 1;
                (void)save(what, &error);
                _exit(0);
            }
            if (!CHECK(child > 0 && waitpid(child, &status, 0) == child)) return;
            killed += WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
            left += is_there(path_beside);
            CHECK(!is_there("power-test.bin.tmp1"));
            memset(&b, 0, sizeof b);
            CHECK(is_new() || (moe_file_read(path, &b, NULL) == MOE_OK && b.size == 3), "the old or the new file");
            moe_buffer_free(&b);
        }
        CHECKF(left > 3, "%d of %d kills leave a file", left, killed);
        CHECK(save(what, &error) == MOE_OK && is_new() && !is_there(path_beside));
    }
    CHECKF(killed >= 150, "%d", killed);
    remove(path);
}

/* ---- streams of the caller's ---- */

typedef struct counted {
    long writes, syncs, writes_at_sync;
    moe_status says;
} counted;

static moe_status count_write(void *ctx, const void *from, size_t size) {
    (void)from;
    ((counted *)ctx)->writes += size > 0;
    return MOE_OK;
}

static moe_status count_sync(void *ctx) {
    counted *c = (counted *)ctx;
    c->syncs++;
    c->writes_at_sync = c->writes;
    return c->says;
}

static void test_streams(void) {
    moe_stream stream;
    moe_error error;
    counted c;
    int k;
    stream.ctx = &c;
    stream.read = NULL;
    stream.write = count_write;
    for (k = 0; k < 4; k++) {
        memset(&c, 0, sizeof c);
        c.says = k == 3 ? MOE_ERR_STOPPED : MOE_OK;
        stream.sync = k == 0 ? NULL : count_sync;
        CHECK((k == 1 ? moe_net_write(&net, &stream, &error) : moe_trainer_write(&trainer, &stream, &error)) == c.says);
        CHECK(c.syncs == (k > 0) && c.writes_at_sync == (k > 0 ? c.writes : 0) && c.writes > 3);
        if (k == 3) CHECK(error.code == MOE_ERR_STOPPED && strstr(error.message, "the stream failed") != NULL);
    }
}

int main(void) {
    moe_layer_config layer;
    moe_train_config config;
    moe_error error;
    memset(&layer, 0, sizeof layer);
    memset(&config, 0, sizeof config);
    layer.d_ff = 9;
    moe_net_init(&net, 6, MOE_KERNELS_AUTO, NULL);
    moe_net_linear(&net, 8);
    moe_net_mixture(&net, &layer);
    if (moe_net_build(&net, 1, 3, &error) != MOE_OK || moe_trainer_init(&trainer, &net, &config, &error) != MOE_OK) {
        puts(error.message);
        return 2;
    }
    CASE(test_power());
    CASE(test_kills());
    CASE(test_streams());
    moe_trainer_free(&trainer);
    moe_net_free(&net);
    return test_end();
}

#else

#include <stdio.h>

int main(void) {
    puts("0 passed, 0 failed, 1 skipped");
    return 0;
}

#endif
