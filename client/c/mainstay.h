/* The heartbeat client for C and C++: reports the progress of training to the launcher.
 *
 * Link with libmainstay_client.so, or with libmainstay_client.a and -lpthread -ldl -lm.
 *
 * Without a page (no MAINSTAY_PAGE in the environment, or one that cannot be used) every call does nothing. No call
 * fails, blocks, or waits for another process; mainstay_beat, mainstay_step*, mainstay_section_enter and
 * mainstay_section_leave make no system call and allocate nothing. Any thread may call. A forked child's calls do
 * nothing until it opens another page. NULL is allowed wherever a pointer is taken; other pointers must be valid,
 * and strings must end in a zero byte.
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

/* Opens the page that MAINSTAY_PAGE names; 1 if beats reach it from now on, else 0. */
int mainstay_open(void);

/* Opens the page at `path`; 1 if beats reach it from now on, else 0. */
int mainstay_open_path(const char *path);

/* 1 if beats reach a page, else 0: before an open, after a close, in a forked child. */
int mainstay_active(void);

/* Why there was a page but it is not used; NULL if there is no problem. Valid for the process's life. */
const char *mainstay_refusal(void);

/* The rank is alive, though no step is complete. */
void mainstay_beat(void);

/* Step `step` is complete. */
void mainstay_step(uint64_t step);

/* Step `step` is complete, with its measures. NULL is "not given", so that a NaN loss can be given: the launcher
 * reports it. */
void mainstay_step_with(uint64_t step, const double *loss, const double *grad_norm, const uint64_t *digest);

/* The id of a section's name, to store and use again; MAINSTAY_SECTION_OTHER if there is no page or no room. */
uint32_t mainstay_section_intern(const char *name);

/* Section `id` starts. Sections of a process are one stack. */
void mainstay_section_enter(uint32_t id);

/* Section `id` ends, and with it those entered after it and not left. One that is not open is ignored and counted. */
void mainstay_section_leave(uint32_t id);

/* Communicator `comm` has entered and completed this many collective operations. The number is the same on all ranks of
 * the communicator, so that the launcher can see which ranks wait for which in a hang. */
void mainstay_collective(uint64_t comm, uint64_t entered, uint64_t completed);

/* As mainstay_collective, with a number for kind, type and size of the operation entered last, the same for the same
 * operation on all ranks; 0 if it is unknown. */
void mainstay_collective_with(uint64_t comm, uint64_t entered, uint64_t completed, uint64_t signature);

/* The rank's current position in its data: a number that is the same whenever the same batch is read, at any step.
 * Call it before the batch is used. A failure that recurs at the same position is attributed to the data and ends the
 * job. */
void mainstay_data_at(uint64_t position);

/* The next phase takes long, at most this many seconds: until then or until mainstay_resume no progress is expected of
 * the job, and no hang is reported. NaN, negative and infinite numbers are a pause. */
void mainstay_expect_long(double seconds);

/* No hang is reported until mainstay_resume. */
void mainstay_pause(void);

/* Progress is expected again, after mainstay_expect_long or mainstay_pause. */
void mainstay_resume(void);

/* Leaves a note on how this process ends, and wakes the launcher. Only the first note is kept. */
void mainstay_exit_note(int kind, const char *exception, const char *message, const char *traceback);

/* Closes the page. Every later call does nothing until the next open. */
void mainstay_close(void);

#ifdef __cplusplus
}
#endif

#endif
