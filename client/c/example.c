/* A training loop that reports its progress to Mainstay.
 *
 * With the library of the .deb or .rpm:
 *
 *   cc example.c $(pkg-config --cflags --libs mainstay) -lm -o example
 *   mainstay run --no-python -- ./example
 */
#include <math.h>
#include <stdio.h>

#include "mainstay.h"

/* Replaces the work of a real step: arithmetic that the compiler cannot remove. */
static double forward_and_backward(uint64_t step) {
    volatile double sum = 0.0;
    for (int i = 1; i < 1000; i++) {
        sum = sum + sin((double)i) / (double)(i + (int)step);
    }
    return fabs(sum);
}

int main(void) {
    /* Training continues in both cases. */
    if (!mainstay_open() && mainstay_refusal() != NULL) {
        fprintf(stderr, "no heartbeats: %s\n", mainstay_refusal());
    }
    uint32_t compute = mainstay_section_intern("compute");
    uint32_t checkpoint = mainstay_section_intern("checkpoint");

    for (uint64_t step = 1; step <= 20; step++) {
        mainstay_data_at(step * 32); /* the first sample of the batch */
        mainstay_section_enter(compute);
        double loss = forward_and_backward(step);
        mainstay_section_leave(compute);
        mainstay_collective(1, step, step);
        if (step % 10 == 0) {
            mainstay_section_enter(checkpoint);
            mainstay_beat(); /* shows during long work that the rank is alive */
            mainstay_section_leave(checkpoint);
        }
        if (step < 20) {
            mainstay_step(step);
        } else {
            uint64_t digest = 42;
            mainstay_step_with(step, &loss, NULL, &digest);
        }
    }
    printf("active=%d\n", mainstay_active());
    mainstay_exit_note(MAINSTAY_EXIT_CLEAN, NULL, "all 20 steps done", NULL);
    mainstay_close();
    return 0;
}
