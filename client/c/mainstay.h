/* The heartbeat client for C and C++: reports the progress of training to the launcher.
 *
 * Link with libmainstay_client.so, or with libmainstay_client.a and -lpthread -ldl -lm.
 *
 * Without a page (no MAINSTAY_PAGE in the environment, or one that cannot be used) every call does nothing. No call
 * fails, blocks, or waits for another process; mainstay_beat, mainstay_step*, mainstay_section_enter and
 * mainstay_section_leave make no system call and allocate nothing. All threads may call them. In a forked child, calls
 * do nothing until it opens another page. Every pointer argument may be NULL; other pointers must be valid, and strings
 * must end in a zero byte.
 *
 * A test compares this file with client/src/ffi.rs. */
#ifndef MAINSTAY_H
#define MAINSTAY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* How a process ends, for mainstay_exit_note. */
#define MAINSTAY_EXIT_EXCEPTION 0
#define MAINSTAY_EXIT_CLEAN 1
#define MAINSTAY_EXIT_OTHER 2

/* The section for all names that do not fit in the page's table of names. */
#define MAINSTAY_SECTION_OTHER 0u

/* Opens the page that MAINSTAY_PAGE names; returns 1 if beats now reach it, else 0. */
int mainstay_open(void);

/* Opens the page at `path`; returns 1 if beats now reach it, else 0. */
int mainstay_open_path(const char *path);

/* Returns 1 if beats reach a page, else 0: before an open, after a close, in a forked child. */
int mainstay_active(void);

/* The reason why the page is not used; NULL if there is no problem. Valid for the life of the process. */
const char *mainstay_refusal(void);

/* Reports that the rank is alive, without a completed step. */
void mainstay_beat(void);

/* Reports that step `step` is complete. */
void mainstay_step(uint64_t step);

/* Reports that step `step` is complete, with its measures. NULL means "not given". A NaN loss is a value: the launcher
 * reports it. */
void mainstay_step_with(uint64_t step, const double *loss, const double *grad_norm, const uint64_t *digest);

/* Returns the id of a section's name, for repeated use; MAINSTAY_SECTION_OTHER if there is no page or no room. */
uint32_t mainstay_section_intern(const char *name);

/* Starts section `id`. The sections of a process form one stack. */
void mainstay_section_enter(uint32_t id);

/* Ends section `id` and all sections that were entered after it. One that is not open is ignored and counted. */
void mainstay_section_leave(uint32_t id);

/* Reports how many collective operations communicator `comm` has entered and completed. `comm` must be the same on all
 * ranks of the communicator, so that the launcher can see which ranks wait for which in a hang. */
void mainstay_collective(uint64_t comm, uint64_t entered, uint64_t completed);

/* As mainstay_collective, with a number for kind, type and size of the last entered operation. It must be the same for
 * the same operation on all ranks; 0 means unknown. */
void mainstay_collective_with(uint64_t comm, uint64_t entered, uint64_t completed, uint64_t signature);

/* Sets the rank's current position in its data: a number that is the same whenever the same batch is read, at any step.
 * Call it before the batch is used. A failure that recurs at the same position is attributed to the data and ends the
 * job. */
void mainstay_data_at(uint64_t position);

/* Sets the number of steps after which this program ends, for the time that is left. 0 means unknown. */
void mainstay_total_steps(uint64_t steps);

/* Announces a long phase of at most this many seconds. Until then, or until mainstay_resume, no progress is expected of
 * the job and no hang is reported. NaN, negative and infinite numbers act like mainstay_pause. */
void mainstay_expect_long(double seconds);

/* Suspends reports of hangs until mainstay_resume. */
void mainstay_pause(void);

/* Ends mainstay_expect_long or mainstay_pause: progress is expected again. */
void mainstay_resume(void);

/* Writes an exit note on how this process ends, and wakes the launcher. Only the first note is kept. */
void mainstay_exit_note(int kind, const char *exception, const char *message, const char *traceback);

/* Closes the page. Later calls do nothing until the next open. */
void mainstay_close(void);

#ifdef __cplusplus
}
#endif

#endif
