/* One layer on four POSIX threads: the same bits as on one thread.
     cc -std=c99 -O2 -I. examples/threads.c -o threads -lm -pthread && ./threads
   or: sh examples/run threads */

#define MOE_IMPLEMENTATION
#include "moe.h"
#include "cli.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { D = 64, N = 256, THREADS = 4 };

typedef struct job {
    void (*task)(void *work, int index);
    void *work;
    int index;
} job;

static moe_real x[N * D], one[N * D], four[N * D];
static unsigned char workspace[1 << 22];

static void *run_job(void *argument) {
    const job *j = (const job *)argument;
    j->task(j->work, j->index);
    return NULL;
}

/* Runs task(work, 0) to task(work, count - 1) in parallel; count is at most THREADS. If a thread
   cannot be started, its task runs here. */
static void run_tasks(void *ctx, void (*task)(void *work, int index), void *work, int count) {
    pthread_t threads[THREADS];
    job jobs[THREADS];
    int started[THREADS] = {0};
    (void)ctx;
    for (int i = 1; i < count; i++) {
        jobs[i] = (job){task, work, i};
        started[i] = pthread_create(&threads[i], NULL, run_job, &jobs[i]) == 0;
    }
    for (int i = 0; i < count; i++)
        if (!started[i]) task(work, i);
    for (int i = 1; i < count; i++)
        if (started[i]) pthread_join(threads[i], NULL);
}

int main(int argc, char **argv) {
    moe_parallel parallel = {NULL, THREADS, 1, run_tasks};
    moe_layer_config config = {0};
    moe_layer layer;
    moe_call call = {0};
    moe_rng rng = {1};
    moe_error error;
    moe_status status;
    int ended = only_help(argc, argv, "threads", "runs a layer on four threads, compares the bits with one thread's");
    if (ended >= 0) return ended;
    config.router.d_model = D;
    for (int i = 0; i < N * D; i++) x[i] = moe_rng_normal(&rng);
    status = moe_layer_create(&layer, &config, 0, 1, NULL, &error);
    call.n_tokens = N;
    call.x = x;
    call.error = &error;
    if (status == MOE_OK) status = moe_layer_forward(&layer, &call, one, workspace, sizeof workspace, NULL);
    call.parallel = &parallel;
    if (status == MOE_OK) status = moe_layer_forward(&layer, &call, four, workspace, sizeof workspace, NULL);
    if (status != MOE_OK) {
        fprintf(stderr, "threads: %s\n", error.message);
        return 1;
    }
    moe_layer_free(&layer);
    puts(memcmp(one, four, sizeof one) == 0 ? "the same bits" : "different bits");
    return memcmp(one, four, sizeof one) != 0 || fflush(stdout) != 0;
}
