//! What gpushd does with unleased processes, and how it reports this.

use gpush_api::{GpuIndex, UnleasedStep};
use gpush_tests::host::program;

use super::{Job, NOBODY, done, start, step_event};

#[test]
fn unleased_process_is_warned_about_once_and_not_ended() {
    let Some((host, agent)) = start("unleased processes that are warned of", "[processes]\nunleased = \"warn\"\n")
    else {
        return;
    };
    let sleep = || Job::start(std::process::Command::new("/bin/sleep").arg("1000"), NOBODY);
    let mut draws = sleep().on(&host, "--gpu 0 --kind graphics");
    assert_eq!(done(&agent, draws.pid()), "warning in the log");
    // The next round warns about the other process. It does not repeat the warning about the first
    // process.
    let other = sleep().on(&host, "--gpu 0 --kind compute");
    assert_eq!(done(&agent, other.pid()), "warning in the log");
    let log = agent.wait_for_log(&format!("process {} ", other.pid()));
    let mut warned = log.lines().filter(|line| line.contains("WARN") && line.contains(&draws.pid().to_string()));
    let warning = warned.next().expect("a warning");
    assert!(
        warning.contains("it uses the GPU for graphics without a lease") && warning.contains("uid=65534"),
        "{warning}"
    );
    assert_eq!((warned.next(), draws.lives()), (None, true));
    let mut list = host.command(program("gpushctl"));
    let list = list.args(["ps", "--unleased"]).env("GPUSH_SOCKET", agent.socket()).output();
    let list = list.expect("gpushctl");
    assert_eq!(list.status.code(), Some(3), "{list:?}");
}

#[test]
fn unleased_process_that_ignores_sigterm_is_killed_after_grace() {
    let config = "[processes]\nunleased = \"end\"\ngrace = \"2s\"\n";
    let Some((host, agent)) = start("unleased processes that do not end", config) else { return };
    let mut listener = agent.listen("?kinds=unleased", None);
    let mut deaf = Job::deaf(NOBODY).on(&host, "--gpu 0 --kind compute");
    let asked = step_event(&mut listener, deaf.pid(), UnleasedStep::Asked);
    assert_eq!((asked.gpu, asked.uid, asked.why.as_str()), (GpuIndex(0), Some(NOBODY), "it computes without MPS"));
    assert!(asked.command.is_some_and(|command| command.contains("trap")));
    let first = done(&agent, deaf.pid());
    let left = first.strip_prefix("asked to end (SIGTERM), will be killed in ").expect(&first);
    // The time that is left depends on the speed of the machine. It is rounded up, so it is never
    // 0.
    assert!(["2s", "1s"].contains(&left), "{first}");
    step_event(&mut listener, deaf.pid(), UnleasedStep::Killed);
    agent.until("the process is killed", || (!deaf.lives()).then_some(()));
}
