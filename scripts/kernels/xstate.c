/*
 * LD_PRELOAD for User Mode Linux on processors whose XSAVE area is larger than its buffer
 * (AMX: "ptrace set fp regs failed, errno = 14"). A read is cut to the caller's buffer, with
 * the state that no longer fits masked out of the header; a write is padded with zeros to
 * the size that the kernel gave. On other processors both are as long as before.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { GETREGSET = 0x4204, SETREGSET = 0x4205, X86_XSTATE = 0x202 };
enum { AREA_BYTES = 12288, SLOTS = 8, XSTATE_BV = 512, LEGACY_BYTES = 520, AMX_BITS = 3 << 17 };

/* Threads of UML may be in here at once; each takes the next slot. The tails of `written` stay zero. */
static char read_areas[SLOTS][AREA_BYTES] __attribute__((aligned(64)));
static char written[SLOTS][AREA_BYTES] __attribute__((aligned(64)));
static unsigned next_slot;
static size_t full_bytes;
static long (*next_ptrace)(int, ...);

__attribute__((constructor)) static void find_next(void)
{
	next_ptrace = (long (*)(int, ...))dlsym(RTLD_NEXT, "ptrace");
}

static long get_area(long pid, void *note, char *area)
{
	struct iovec whole = { area, AREA_BYTES };
	long failed = syscall(SYS_ptrace, (long)GETREGSET, pid, note, &whole);

	if (!failed)
		full_bytes = whole.iov_len;
	return failed;
}

long ptrace(int request, ...)
{
	va_list rest;
	va_start(rest, request);
	long pid = va_arg(rest, long);
	void *note = va_arg(rest, void *);
	void *data = va_arg(rest, void *);
	va_end(rest);
	if ((request != GETREGSET && request != SETREGSET) || (long)note != X86_XSTATE)
		return next_ptrace(request, pid, note, data);

	unsigned slot = __sync_fetch_and_add(&next_slot, 1) % SLOTS;
	struct iovec *wanted = data;
	if (request == GETREGSET || !full_bytes) {
		long failed = get_area(pid, note, read_areas[slot]);
		if (failed)
			return failed;
	}
	if (request == GETREGSET) {
		size_t bytes = full_bytes < wanted->iov_len ? full_bytes : wanted->iov_len;
		memcpy(wanted->iov_base, read_areas[slot], bytes);
		if (bytes < full_bytes && bytes >= LEGACY_BYTES)
			*(unsigned long *)((char *)wanted->iov_base + XSTATE_BV) &= ~(unsigned long)AMX_BITS;
		wanted->iov_len = bytes;
		return 0;
	}
	memcpy(written[slot], wanted->iov_base, wanted->iov_len < full_bytes ? wanted->iov_len : full_bytes);
	struct iovec whole = { written[slot], full_bytes };
	return syscall(SYS_ptrace, (long)SETREGSET, pid, note, &whole);
}
