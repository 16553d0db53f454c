//! Settings of the daemon itself.

use std::process::Stdio;

use gpush_api::{MemoryLimit, Percentage, Priority};
use gpush_mps::protocol::{control::ControlError, lock};

use crate::daemon::{LONG, Setup, Trait, another_uid};

pub(crate) async fn lock_holder_is_the_process_that_greets(setup: Setup) {
    let daemon = setup.start().await;
    let found = daemon.control.daemon(LONG).await.unwrap();
    assert_eq!((found.pid, found.uid), (daemon.pid(), nix::unistd::geteuid().as_raw()));
    assert_eq!(lock::holder(&daemon.setup.pipe).unwrap(), Some(daemon.pid()));
    assert_eq!(lock::holder(&daemon.setup.path("log")).unwrap(), None);
}

pub(crate) async fn settings_read_back_as_set(setup: Setup) {
    let daemon = setup.start().await;
    let control = &daemon.control;
    assert_eq!(control.default_percentage(LONG).await.unwrap(), Percentage::ALL);
    for text in ["25", "12.5", "33.3", "0.1", "100"] {
        let percentage = text.parse().unwrap();
        control.set_default_percentage(percentage, LONG).await.unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(control.default_percentage(LONG).await.unwrap(), percentage);
    }
    assert_eq!(control.default_memory_limit(LONG).await.unwrap(), None);
    for text in ["1M", "512M", "1536M", "8G", "80G"] {
        let limit: MemoryLimit = text.parse().unwrap();
        control.set_default_memory_limit(Some(limit), LONG).await.unwrap_or_else(|e| panic!("{text}: {e}"));
    }
    control.set_default_memory_limit(None, LONG).await.unwrap();
    assert_eq!(control.default_memory_limit(LONG).await.unwrap(), None);
    for priority in [Priority::BelowNormal, Priority::Normal] {
        control.set_default_priority(priority, LONG).await.unwrap();
    }
    assert_eq!(control.servers(LONG).await.unwrap(), [] as [i32; 0]);
}

pub(crate) async fn environment_sets_only_percentage_and_priority(setup: Setup) {
    let setup = setup
        .with("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "37.5")
        .with("CUDA_MPS_CLIENT_PRIORITY", "1")
        .with("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=2G");
    let daemon = setup.start().await;
    assert_eq!(daemon.control.default_percentage(LONG).await.unwrap().tenths(), 375);
    assert_eq!(daemon.control.default_priority(LONG).await.unwrap(), Priority::BelowNormal);
    assert_eq!(daemon.control.default_memory_limit(LONG).await.unwrap(), None);
}

/// The daemon accepts odd values without an error. So gpush validates every value before it sends
/// the value to the daemon.
pub(crate) async fn odd_values_are_parsed_as_recorded(setup: Setup) {
    let daemon = setup.start().await;
    const PERCENTAGE: &str = "default_active_thread_percentage";
    for (text, shown) in [
        ("40", "40.0"),
        ("0", "40.0"),
        ("-5", "40.0"),
        ("101", "40.0"),
        ("abc", "40.0"),
        ("33.37", "33.4"),
        ("0.01", "0.0"),
        ("50%", "50.0"),
    ] {
        assert_eq!(daemon.says(&format!("set_{PERCENTAGE} {text}")).await, [shown], "{text}");
        assert_eq!(daemon.says(&format!("get_{PERCENTAGE}")).await, [shown], "{text}");
    }
    const MEMORY: &str = "default_device_pinned_mem_limit";
    for (text, shown) in [
        ("1536M", "1G"),
        ("1.5G", "1M"),
        ("1 G", "1M"),
        ("1T", "1M"),
        ("512", "512M"),
        ("512K", "512M"),
        ("0", ""),
        ("8G", "8G"),
        ("abc", ""),
    ] {
        assert_eq!(daemon.says(&format!("set_{MEMORY} 0 {text}")).await, [""; 0], "{text}");
        assert_eq!(daemon.says(&format!("get_{MEMORY} 0")).await.concat(), shown, "{text}");
    }
    // The daemon has no device 40, so the first command changes no limit. The daemon reads a UUID,
    // which is not a number, as device 0 with limit 0, so the second command clears the limit of
    // device 0.
    for (line, left) in
        [("set_default_device_pinned_mem_limit 40 1G", "8G"), ("set_default_device_pinned_mem_limit GPU-1 1G", "")]
    {
        daemon.says(&format!("set_{MEMORY} 0 8G")).await;
        assert_eq!(daemon.says(line).await, [""; 0]);
        assert_eq!(daemon.says(&format!("get_{MEMORY} 0")).await.concat(), left, "{line}");
    }
    assert_eq!(daemon.says("set_default_client_priority 2").await, ["Invalid priority value - must be 0 or 1!"]);
    daemon.says("set_default_client_priority 1").await;
    assert_eq!(daemon.says("set_default_client_priority abc").await, [""; 0]);
    assert_eq!(daemon.says("get_default_client_priority").await, ["0"]);
}

pub(crate) async fn unknown_command_is_reported(setup: Setup) {
    let daemon = setup.start().await;
    for line in ["help", "GET_SERVER_LIST", "set"] {
        assert_eq!(daemon.says(line).await, [format!("Unknown command \"{line}\"")]);
    }
    let state = daemon.control.server_state(1, LONG).await.unwrap_err();
    match daemon.has(Trait::KnowsServerStatus).await {
        true => assert!(matches!(state, ControlError::NoServer), "{state:?}"),
        false => assert!(matches!(state, ControlError::Unknown(_)), "{state:?}"),
    }
}

pub(crate) async fn other_user_cannot_end_the_daemon(setup: Setup) {
    let Some(uid) = another_uid("other_user_cannot_end_the_daemon") else { return };
    let daemon = setup.start().await;
    let asked = |line: &str| {
        let mut front = daemon.setup.command(&daemon.setup.control_program());
        std::os::unix::process::CommandExt::uid(&mut front, uid);
        let mut front = front.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        std::io::Write::write_all(&mut front.stdin.take().unwrap(), format!("{line}\n").as_bytes()).unwrap();
        String::from_utf8(front.wait_with_output().unwrap().stdout).unwrap().trim().to_owned()
    };
    assert_eq!(asked("quit"), "Not enough privilege to execute quit command");
    let refused = format!("Insufficient privileges for UID {uid}");
    assert_eq!(asked("start_server -uid 0"), refused);
    let set = if daemon.has(Trait::StrangersMaySet).await { "50.0".to_owned() } else { refused };
    assert_eq!(asked("set_default_active_thread_percentage 50"), set);
}
