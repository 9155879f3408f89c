/* Measures calls of the C client: prints one JSON object with the median of 501 batches of 2000 calls, in ns per call.
 *
 *   cargo build --release -p mainstay-client --examples
 *   cc -O2 client/c/beat_cost.c -Iclient/c -Ltarget/release/deps -lmainstay_client \
 *      -Wl,-rpath,target/release/deps -o beat_cost
 *   cargo run --release -p mainstay-client --example fresh_page /dev/shm/try.page
 *   MAINSTAY_PAGE=/dev/shm/try.page ./beat_cost
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "mainstay.h"

#define BATCHES 501
#define CALLS 2000

static uint32_t section;

static void beat(uint64_t step) {
    (void)step;
    mainstay_beat();
}

static void step_with(uint64_t step) {
    double loss = 1.5, grad_norm = 0.5;
    uint64_t digest = 7;
    mainstay_step_with(step, &loss, &grad_norm, &digest);
}

static void section_pair(uint64_t step) {
    (void)step;
    mainstay_section_enter(section);
    mainstay_section_leave(section);
}

static double now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static int ascending(const void *left, const void *right) {
    double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median_ns(void (*call)(uint64_t)) {
    static double batches[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        double start = now_ns();
        for (uint64_t step = 0; step < CALLS; step++) {
            call(step);
        }
        batches[batch] = (now_ns() - start) / CALLS;
    }
    qsort(batches, BATCHES, sizeof batches[0], ascending);
    return batches[BATCHES / 2];
}

int main(void) {
    if (!mainstay_open()) {
        const char *why = mainstay_refusal();
        fprintf(stderr, "beat_cost: %s\n", why ? why : "MAINSTAY_PAGE is not set");
        return 1;
    }
    section = mainstay_section_intern("forward");
    printf("{\"heartbeat_ns\": %.1f, \"step_ns\": %.1f, \"step_with_ns\": %.1f, \"section_pair_ns\": %.1f}\n",
           median_ns(beat), median_ns(mainstay_step), median_ns(step_with), median_ns(section_pair));
    return 0;
}
