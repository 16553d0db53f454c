//! The texts of `gpushctl explain`: mechanisms, leases, states, Xid errors, exit statuses and codes of errors.

use gpush_api::Code;
use gpush_core::lint::Lint;

use super::Appearance;
use crate::args::topic::{CODES, Page, code_name};

/// Draws a page: each paragraph is wrapped; indented lines stay as they are.
pub(crate) fn page(page: Page, look: &Appearance) -> String {
    wrapped(text(page), look)
}

fn wrapped(text: &str, look: &Appearance) -> String {
    let mut out = String::new();
    for line in text.lines() {
        if line.is_empty() || line.starts_with(' ') {
            out += line;
        } else {
            out += &look.wrap("", line).join("\n");
        }
        out.push('\n');
    }
    out
}

/// Returns the text of a page.
pub(crate) fn text(page: Page) -> &'static str {
    match page {
        Page::Mig => {
            "\
MIG (Multi-Instance GPU) divides a data-centre GPU into instances with their own memory, compute slices and faults.

An instance has a profile such as 1g.10gb: 1 compute slice and 10 GB of memory. A layout is the list of instances of a GPU. A rule with mode `mig` sets the layout; leases get its MIG devices. With `layout = \"dynamic\"`, leases create and remove instances.

  gpushctl mig profiles 0                       what the GPU can have
  gpushctl mig apply '1g.10gb*7' --dry-run -g 0   what a layout would change
  gpushctl mig list --free                      free devices
  gpushctl run --mig 1g.10gb -- COMMAND         use one
"
        }
        Page::Mps => {
            "\
MPS (Multi-Process Service) lets several processes compute on one GPU at the same time.

gpushd runs one control daemon for each GPU or MIG device whose rule has mode `mps`. Each lease has an active thread percentage and a memory limit. Both are ceilings that cooperating programs keep: a program can change its own limits. A fault of one client ends the other clients of the same server.

A daemon serves one user at a time, unless the rule has `users = \"many\"`.

  gpushctl mps list                             daemons, clients, what is left
  gpushctl run --mps 25 -- COMMAND              use a quarter
  gpushctl mps stop 0 --wait                    stop after the last client
"
        }
        Page::Timeslice => {
            "\
With time-slicing, the processes on a GPU take turns. Each gets the whole GPU for a slice of time.

Nothing is isolated: processes share the memory, and one process can use all of it. The rule sets how many leases the GPU gets (`replicas`) and how long the slices are (`level`). A level applies only to CUDA contexts that are created after it was set.

  gpushctl gpu show 0                           replicas, level, leases
  gpushctl run --timeslice -- COMMAND           use one replica
"
        }
        Page::Lease => {
            "\
A lease is the right of a user to a share of one or more GPUs, for a time.

  queued -> granting -> active -> releasing -> ended

`run` requests a lease, runs a command in it, and ends the lease with the command. `lease request` gets a lease that outlives the command. A lease ends when its time is over, when you end it, when its session, process or job ends, or when an administrator ends it. It is `releasing` until none of its processes is left; until then its capacity is not free.

Rules decide where a user may lease, quotas decide how much.

  gpushctl run --mig 1g.10gb -- COMMAND
  gpushctl lease request --whole --for 2h
  gpushctl lease list                           all leases
  gpushctl lease end L17
  gpushctl quota                                your limits, and what is left
"
        }
        Page::States => {
            "\
State of a GPU:
  maintenance  gpushd has no GPU open: `gpushctl maintenance leave`
  lost         the GPU fell off the bus: reboot the host
  unknown      a driver call did not return, or the GPU cannot be read:
               `gpushctl doctor`
  held         the database was lost or the config is invalid, so gpushd
               grants nothing: `gpushctl explain held`
  changing     an operation changes the GPU; wait for its end
  degraded     a change and its rollback failed: `gpushctl apply GPU`
  cordoned     no new work, after a fault or for an administrator:
               `gpushctl explain cordoned`
  ready        none of the others

If several states apply to a GPU, gpushctl shows the first of them.
"
        }
        Page::Held => {
            "\
On a held GPU, gpushd changes nothing and grants nothing, because it does not know how the GPU is used. Programs and leases that already run continue.

gpushd holds all managed GPUs for one of two reasons:

  - gpushd cannot use the config file. Correct the file and reload it:
    `gpushctl config check`, then `gpushctl config reload` (administrator).
  - The database of gpushd was lost. `gpushctl status` shows the command that
    releases the GPUs. A reboot also releases them.
"
        }
        Page::Cordoned => {
            "\
A cordoned GPU accepts no new work. Running processes and leases continue.

gpushd cordons a GPU after an Xid error in `health.cordon_xids`. An administrator cordons a GPU with `gpushctl gpu cordon GPU` or `gpushctl gpu drain GPU`. The second command also waits until the GPU is idle.

  gpushctl gpu show GPU           why the GPU is cordoned
  gpushctl gpu holders GPU        what still uses it
  gpushctl gpu uncordon GPU       allow new work again (administrator)
"
        }
        Page::Lost => {
            "\
A lost GPU has fallen off the bus (Xid 79): the driver cannot reach it any more. Its programs have failed.

A GPU that is off the bus cannot be reset. Reboot the host. If it happens again, check power, temperature and the slot, or replace the GPU.

  gpushctl explain xid-79
  gpushctl events -k xid          when it happened
"
        }
        Page::Drift => {
            "\
Drift is a difference between a GPU and its desired state: the rule in the config, or the override that replaces the layout of the rule.

Examples are missing or additional MIG instances, and MIG mode that is enabled on a GPU whose rule has mode `mps`. A layout that an administrator has applied is an override, not drift. With --once, it is drift.

gpushd repairs drift after a boot. It repairs drift every minute only if the config has `auto_reconcile = true`.

  gpushctl config diff            the differences (administrator)
  gpushctl config overrides       layouts that replace those of the config
  gpushctl apply --dry-run        what a repair would change
  gpushctl apply                  repair all GPUs (administrator)
"
        }
        Page::Quota => {
            "\
A quota limits the leases of each user that it names: how many, how large, and how long. A `[[quota]]` section of the config sets it. Only the first quota that names a user applies. If no quota names a user, standard limits apply.

If a quota denies a request, the error names the limit. To free a part of your quota, end a lease that you do not need.

  gpushctl quota                  your limits, what you use, what is left
  gpushctl quota --user anna      of another user (administrator)
  gpushctl lease list --mine      your leases
  gpushctl lease end L17          end one
"
        }
        Page::MigMode => {
            "\
MIG mode is a setting of a GPU. While it is enabled, programs compute only on MIG instances. While it is disabled, the GPU has no instances and programs use the whole GPU.

`gpushctl mig apply LAYOUT -g GPU` (administrator) enables MIG mode if the layout needs it. The mode changes only while the GPU is idle. On Ampere GPUs, the change needs a reset of the GPU. From Hopper on, a reboot of the host disables MIG mode, and gpushd enables it again if the layout of the rule needs it.

  gpushctl gpu show 0             the present mode
  gpushctl mig on 0               enable, without instances (administrator)
  gpushctl mig off 0              disable, destroy instances (administrator)
"
        }
        Page::Xid => {
            "\
An Xid is the number of an error that NVIDIA's driver reports. The kernel log has the line `NVRM: Xid`, and `gpushctl events -k xid` lists the errors that gpushd has seen. If the kernel log names the process that caused an error, the event has this process and its lease. `gpushctl explain xid-79` explains one number.

gpushd cordons the GPU after the errors in `health.cordon_xids`, because NVIDIA advises to reset or replace the GPU after them.
"
        }
        Page::ExitCodes => {
            "\
Exit status of gpushctl:
  0 done                   5 denied
  1 other error            6 gpushd unavailable
  2 wrong usage            7 unsupported
  3 differs or drift       8 timed out
  4 blocked or busy      130 interrupted

`run` exits with the status of its command, with 128 + the number of the signal that ended it, or with 125 (no lease), 126 (command not runnable) or 127 (not found).

With --json, an error has a `code`: `gpushctl explain blocked` explains the code `blocked`.
"
        }
    }
}

/// Who causes an Xid error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cause {
    /// A program that computes on the GPU.
    Program,
    /// The GPU, its memory, or a link.
    Hardware,
    /// The driver or the GPU's firmware.
    Driver,
    /// It follows another error.
    Another,
}

/// Xid errors: number, meaning, who causes them. Source: NVIDIA's catalogue of Xid errors.
const XIDS: [(u64, &str, Cause); 24] = [
    (13, "graphics engine exception, such as an access out of bounds in a kernel", Cause::Program),
    (31, "memory page fault: a program accessed an invalid address", Cause::Program),
    (32, "invalid or corrupted push buffer", Cause::Driver),
    (38, "driver firmware error", Cause::Driver),
    (43, "the GPU stopped processing the work of one program", Cause::Program),
    (45, "a program's work was removed, often after it was killed", Cause::Another),
    (46, "the GPU stopped processing", Cause::Driver),
    (48, "double-bit ECC error", Cause::Hardware),
    (61, "internal microcontroller breakpoint", Cause::Driver),
    (62, "internal microcontroller halt", Cause::Driver),
    (63, "a bad memory row was recorded; the next reset replaces it", Cause::Hardware),
    (64, "a bad memory row could not be recorded", Cause::Hardware),
    (68, "exception of the video decoder", Cause::Program),
    (74, "NVLink error", Cause::Hardware),
    (79, "the GPU has fallen off the bus", Cause::Hardware),
    (92, "high rate of single-bit ECC errors", Cause::Hardware),
    (94, "contained memory error: it ended only the affected program", Cause::Hardware),
    (95, "uncontained memory error: it can affect all programs on the GPU", Cause::Hardware),
    (109, "a context switch did not end in time", Cause::Program),
    (119, "the GPU's system processor (GSP) does not answer", Cause::Driver),
    (120, "the GPU's system processor (GSP) has failed", Cause::Driver),
    (121, "error on the link between CPU and GPU", Cause::Hardware),
    (140, "unrecovered ECC error", Cause::Hardware),
    (154, "the GPU needs an action, such as a reset or a reboot", Cause::Another),
];

/// Explains an Xid error, and what to do.
pub(crate) fn xid(number: u64, look: &Appearance) -> String {
    let Some((_, meaning, cause)) = XIDS.iter().find(|(known, ..)| *known == number) else {
        return wrapped(
            &format!(
                "Xid {number}: gpushctl does not know this error. NVIDIA's catalogue of Xid errors explains it; \
                 `gpushctl events -k xid` shows when it occurred."
            ),
            look,
        );
    };
    let advice = match (number, cause) {
        (79, _) => {
            "Reboot the host: a GPU that is off the bus cannot be reset. If it happens again, check power, temperature and \
             the slot."
        }
        (_, Cause::Program) => {
            "The program is at fault, and other programs continue. Check it with compute-sanitizer. If several programs \
             fail on one GPU only, suspect the hardware."
        }
        (_, Cause::Another) => "It follows another error: look at the errors before it with `gpushctl events -k xid`.",
        (_, Cause::Driver) => {
            "Drain and reset the GPU: `gpushctl gpu drain GPU`, then `gpushctl gpu reset GPU` (administrator). If \
             it happens again, update the driver, and report it to NVIDIA."
        }
        (_, Cause::Hardware) => {
            "Drain and reset the GPU: `gpushctl gpu drain GPU`, then `gpushctl gpu reset GPU` (administrator). If \
             it happens again, replace the GPU."
        }
    };
    wrapped(&format!("Xid {number}: {meaning}.\n\n{advice}"), look)
}

/// Explains the code of an error: what it means, its exit status, and what to do.
pub(crate) fn code(code: Code, look: &Appearance) -> String {
    let (meaning, advice) = match code {
        Code::BadRequest => ("The command or request is invalid.", "See the hint of the error, or `--help`."),
        Code::NotFound => (
            "There is no GPU, lease, operation, layout or file with that name.",
            "List what exists: `gpushctl status`.",
        ),
        Code::UnknownProfile => {
            ("The GPU has no MIG profile with that name.", "`gpushctl mig profiles GPU` lists them.")
        }
        Code::LayoutImpossible => {
            ("The layout fits on the GPU in no placement.", "`gpushctl mig profiles GPU` lists the placements.")
        }
        Code::ConfigInvalid => ("The config file is invalid.", "`gpushctl config check` names each line."),
        Code::Blocked => (
            "Something in use blocks the request: processes, leases or clients, which the error names.",
            "Add --wait, or end what blocks: `gpushctl lease list`, `gpushctl ps`.",
        ),
        Code::Conflict => (
            "Another operation uses the GPU, its rule has another mode, or the desired state has changed.",
            "Look at `gpushctl status` and `gpushctl operation list`, then repeat the command.",
        ),
        Code::Resetting => ("A GPU is being reset, so no GPU can be read or changed.", "Repeat the command later."),
        Code::Denied => (
            "You do not have the permission, or a quota denies the request.",
            "`gpushctl quota` shows your limits. Root and members of `access.admin_groups` are administrators.",
        ),
        Code::Unavailable => {
            ("gpushd is starting, has reached a limit, or cannot record changes.", "`gpushctl doctor`")
        }
        Code::Stopping => ("gpushd is stopping. The request had no effect.", "Repeat the command."),
        Code::Unreachable => ("No program answers on the socket.", "`systemctl status gpushd`, then `gpushctl doctor`"),
        Code::Unsupported => (
            "The GPU model, its mode or the driver does not support the request.",
            "`gpushctl gpu show GPU` shows the mode, `gpushctl explain isolation` what the mechanisms can do.",
        ),
        Code::DriverTimeout => (
            "A driver call did not return in time, and may still take effect.",
            "The GPU is `unknown` until gpushd has read it: `gpushctl status`.",
        ),
        Code::TimedOut => (
            "An operation did not begin, or a lease was not granted, in the given time. If gpushd did not answer in time, \
             the request may still take effect.",
            "`gpushctl operation list` and `gpushctl lease list` show what gpushd knows.",
        ),
        Code::Cancelled => ("A user cancelled the operation.", "`gpushctl operation show` shows who."),
        Code::DriverUnavailable => (
            "The driver is missing, is not loaded, or has another version than its library.",
            "`gpushctl doctor --only driver`",
        ),
        Code::DriverError => ("A driver call failed.", "`gpushctl doctor`, and the kernel log: `dmesg`"),
        Code::GpuLost => ("The GPU fell off the bus.", "Reboot the host: such a GPU cannot be reset."),
        Code::Internal => ("A fault of gpush.", "`gpushctl support-bundle` writes what a report needs."),
    };
    let first = format!("{} (exit status {}): {meaning}", code_name(code), code.exit_status());
    wrapped(&format!("{first}\n\n{advice}"), look)
}

/// Explains a lint: the mistake, and what to do.
pub(crate) fn lint(lint: Lint, look: &Appearance) -> String {
    wrapped(&format!("{lint}: {}.\n\n{}", lint.title(), lint.explanation()), look)
}

/// Lists the topics.
pub(crate) fn topics(look: &Appearance) -> String {
    let pages = Page::ALL.map(Page::name).join(", ");
    let codes = CODES.map(code_name).join(", ");
    let mut out = String::new();
    for (name, what) in [
        ("mechanisms and terms: ", format!("isolation, {pages}")),
        ("an Xid error: ", "xid-79, or only its number".to_owned()),
        ("a mistake in a config: ", format!("{} to {}", Lint::ALL[0], Lint::ALL[Lint::ALL.len() - 1])),
        ("the code of an error: ", codes),
        ("a MIG device: ", "its UUID, MIG-…".to_owned()),
    ] {
        out += &(look.wrap(name, &what).join("\n") + "\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn every_topic_at_80_columns() {
        let look = fixtures::look(80, Charset::Ascii);
        let pages = Page::ALL.map(|one| format!("$ gpushctl explain {}\n{}", one.name(), page(one, &look)));
        let xids =
            [13, 48, 79, 119, 154, 7].map(|number| format!("$ gpushctl explain xid-{number}\n{}", xid(number, &look)));
        let codes = CODES.map(|one| format!("$ gpushctl explain {}\n{}", code_name(one), code(one, &look)));
        let lints = Lint::ALL.map(|one| format!("$ gpushctl explain {one}\n{}", lint(one, &look)));
        let all = [topics(&look), pages.join("\n"), xids.join("\n"), codes.join("\n"), lints.join("\n")].join("\n");
        for line in all.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        insta::assert_snapshot!(fixtures::plain(&all));
    }

    #[test]
    fn each_xid_that_causes_a_cordon_is_explained() {
        let settings = gpush_core::config::Config::default();
        for number in &settings.health.cordon_xids {
            assert!(XIDS.iter().any(|(known, ..)| *known == u64::from(*number)), "{number}");
        }
    }
}
