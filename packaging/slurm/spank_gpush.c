/*
 * SPANK plugin of gpush: adds --gpush=SPEC to sbatch, srun and salloc, and checks SPEC when a user submits a job.
 *
 *   gcc -shared -fPIC -O2 -Wall -o spank_gpush.so spank_gpush.c     (headers: libslurm-dev, or slurm-devel)
 *
 * plugstack.conf, on submit hosts and on nodes:
 *
 *   optional /usr/lib/gpush/spank_gpush.so [gpushctl=/usr/bin/gpushctl]
 *
 * Prolog reads the option as SPANK__SLURM_SPANK_OPTION_gpush_gpush. It checks the request again, because a user can set
 * this variable without the plugin. So the check in the plugin only reports errors earlier. On a submit host without
 * gpushctl, the plugin does not check the request.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(gpush, 1);

/* The maximum length of a request, in bytes. */
#define LONGEST 1024

/* The maximum length of gpushctl's output that is shown, in bytes. */
#define MOST_TEXT 4096

static char gpushctl[4096] = "/usr/bin/gpushctl";

static int accept_option(int val, const char *spec, int remote);

static struct spank_option option = {
	"gpush", "SPEC",
	"Share of the job's GPU, such as mps=25,memory=8G (see gpushctl run --help)",
	1, 0, accept_option
};

/* Shows what gpushctl printed, line by line. */
static void show(char *text)
{
	char *line, *rest = NULL;

	for (line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
		if (!strncmp(line, "error: ", 7))
			line += 7;
		slurm_error("gpush: %s", line);
	}
}

/* Runs `gpushctl slurm check-spec SPEC`, without a shell. Returns 0 if the request is valid, or if it cannot be checked. */
static int check(const char *spec)
{
	char *const arguments[] = { gpushctl, "slurm", "check-spec", "--", (char *)spec, NULL };
	char text[MOST_TEXT + 1], rest[512];
	size_t length = 0;
	ssize_t got;
	int ends[2], status = 0;
	pid_t child;

	if (access(gpushctl, X_OK) || pipe2(ends, O_CLOEXEC))
		return 0;
	child = fork();
	if (child < 0) {
		close(ends[0]);
		close(ends[1]);
		return 0;
	}
	if (!child) {
		int nothing = open("/dev/null", O_RDWR);

		if (nothing < 0 || dup2(nothing, 0) < 0 || dup2(nothing, 1) < 0 || dup2(ends[1], 2) < 0)
			_exit(127);
		execv(gpushctl, arguments);
		_exit(127);
	}
	close(ends[1]);
	for (;;) {
		/* Also read output that does not fit into `text`. Otherwise gpushctl could not end. */
		char *to = length < MOST_TEXT ? text + length : rest;
		size_t room = length < MOST_TEXT ? MOST_TEXT - length : sizeof(rest);

		got = read(ends[0], to, room);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			break;
		if (to != rest)
			length += (size_t)got;
	}
	close(ends[0]);
	text[length] = '\0';
	while (waitpid(child, &status, 0) < 0)
		if (errno != EINTR)
			return 0;
	/* 127: gpushctl could not be started. 2: an older gpushctl does not know the command. */
	if (!WIFEXITED(status) || WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 127)
		return 0;
	if (WEXITSTATUS(status) == 2 && strstr(text, "unrecognized subcommand"))
		return 0;
	show(text);
	return -1;
}

static int accept_option(int val, const char *spec, int remote)
{
	const unsigned char *at;

	(void)val;
	if (remote)
		return 0;
	if (!spec || !*spec) {
		slurm_error("gpush: --gpush needs a request, such as --gpush=mps=25");
		return -1;
	}
	if (strlen(spec) > LONGEST) {
		slurm_error("gpush: the request has more than %d bytes", LONGEST);
		return -1;
	}
	for (at = (const unsigned char *)spec; *at; at++) {
		if (*at < ' ' || *at == 127) {
			slurm_error("gpush: the request has a control character");
			return -1;
		}
	}
	return check(spec);
}

int slurm_spank_init(spank_t spank, int count, char **arguments)
{
	int i;

	for (i = 0; i < count; i++) {
		const char *value = arguments[i];

		if (strncmp(value, "gpushctl=/", 10) || strlen(value + 9) >= sizeof(gpushctl)) {
			slurm_error("gpush: plugstack.conf: %s is not gpushctl=PATH", value);
			return -1;
		}
		strcpy(gpushctl, value + 9);
	}
	return spank_option_register(spank, &option) == ESPANK_SUCCESS ? 0 : -1;
}
