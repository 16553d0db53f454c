//! Tests of `gpushctl metrics write`.

use std::{fs, os::unix::fs::MetadataExt as _};

use super::*;

/// Returns the names of the files in the directory, without the socket.
fn files(host: &Host) -> Vec<String> {
    let names = fs::read_dir(host.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.to_string_lossy().into_owned()).filter(|name| name != "gpushd.sock").collect()
}

#[test]
fn file_has_the_classic_format_and_mode_0640() {
    let host = Host::new();
    let agent = agent(&host);
    let file = host.write("gpush.prom", "old");
    assert_eq!(host.run(&["metrics", "write", "gpush.prom"]), "$ gpushctl metrics write gpush.prom\n[exit 0]\n");
    assert_eq!(fs::read_to_string(&file).unwrap(), format!("{PUBLIC}{OF_LEASES}"));
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o640);
    let output = host.command(&["metrics", "write", "gpush.prom", "--public", "--json"]).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&document["file"], &document["bytes"]), (&"gpush.prom".into(), &PUBLIC.len().into()));
    assert_eq!(fs::read_to_string(&file).unwrap(), PUBLIC);
    let requests = agent.requests.lock().unwrap();
    assert!(requests.iter().all(|request| request.accept == CLASSIC), "{requests:?}");
    assert_eq!(files(&host), ["gpush.prom"]);
}

#[test]
fn old_file_stays_whole_after_each_failure() {
    let host = Host::new();
    let file = host.write("gpush.prom", "old");
    let mut text = host.run(&["metrics", "write", "gpush.prom"]);
    let answers = [
        Answer::error(&ApiError::new(Code::Unavailable, "gpushd reads the GPUs for the first time")),
        Answer::Text(OPEN_METRICS, "# EOF\n".to_owned()),
        Answer::HangUp,
    ];
    let answers = std::sync::Mutex::new(Vec::from(answers));
    Agent::listen(&host.path("gpushd.sock"), move |_| answers.lock().unwrap().pop().unwrap());
    for _ in 0..3 {
        text += &host.run(&["metrics", "write", "gpush.prom"]);
    }
    text += &host.run(&["metrics", "write", "gpush.txt"]);
    text += &host.run(&["metrics", "write", "none/gpush.prom"]);
    text += &host.run(&["metrics", "write", "gpush.prom", "--group", "no-such-group"]);
    text += &host.run(&["metrics", "write"]);
    insta::assert_snapshot!(text);
    assert_eq!(fs::read_to_string(&file).unwrap(), "old");
    assert_eq!(files(&host), ["gpush.prom"]);
}
