//! MPS daemons that the real gpushd starts, adopts, stops, drains and ends. The tests use a
//! simulated control daemon, and also NVIDIA's control daemon if it is installed. The servers are
//! simulated.

use std::path::{Path, PathBuf};

use gpush_api::{Code, MpsState};
use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    mps::{
        Client, Role, act, base, becomes, controls, daemon, daemons, end_leases, lease, parts, reaches, real_programs,
        signal,
    },
};
use nix::sys::signal::Signal;
use serde_json::{Value, json};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n";
const MANAGE: &str = "[mps]\nhealth = \"1s\"\n";

/// Returns a config in which GPU 0 is shared with these settings, and GPU 1 has no rule.
fn config(rule: &str) -> String {
    format!("{MANAGE}[[gpu]]\nname = \"lab\"\nmatch = [\"0\"]\nmode = \"mps\"\n{rule}")
}

fn start(host: &Host, programs: Option<&Path>, config: &str) -> Agent {
    let setup = Setup::on(host).config(config);
    match programs {
        Some(dir) => setup.env("GPUSH_MPS_PROGRAMS", dir.display().to_string()).start(),
        None => setup.start(),
    }
}

/// Returns the compute mode of a GPU, read without gpushd: 0 is the default mode, 3 is exclusive
/// process.
fn compute_mode(host: &Host, gpu: usize) -> Value {
    host.show()["gpus"][gpu]["state"]["compute_mode"].clone()
}

/// Runs a test with the simulated control daemon, and then with NVIDIA's control daemon if it is
/// installed.
fn both(what: &str, test: impl Fn(&Host, Option<&Path>)) {
    let host = Host::up(HOST);
    test(&host, None);
    drop(host);
    let host = Host::up(HOST);
    let programs: Option<PathBuf> = real_programs(&host, what);
    if let Some(programs) = programs {
        test(&host, Some(&programs));
    }
}

#[test]
fn daemon_follows_its_rule_and_outlives_gpushd() {
    both("rule and restarts with NVIDIA's own MPS daemon", |host, programs| {
        let config = config("mps = { percentage = 50, memory = \"4G\" }\n");
        let agent = start(host, programs, &config);
        let ready = reaches(&agent, "0", MpsState::Ready);
        let pid = ready.pid.expect("a pid").cast_signed();
        assert_eq!(controls(&base(host)), [pid]);
        assert_eq!(ready.in_force.as_ref(), Some(&ready.wanted.settings), "{ready:#?}");
        assert_eq!(ready.wanted.settings.percentage.to_string(), "50");
        assert_eq!(compute_mode(host, 0), json!(3), "no program can get past the daemon");
        assert_eq!(compute_mode(host, 1), json!(0));
        let taken = lease(&agent, "0", &json!({ "percentage": 25 })).expect("a lease");
        let mut client = Client::start(host, &taken.environment);
        assert_eq!(client.word("percentage"), "25.0");
        let seen = becomes(&agent, "0", "with its client", |daemon| daemon.clients.len() == 1);
        assert_eq!(seen.clients[0].pid.map(u32::cast_signed), Some(client.pid()));
        assert_eq!(seen.clients[0].lease, Some(taken.lease.id.to_string()));
        assert_eq!(seen.findings, Vec::<String>::new());

        // The daemon survives a stop of gpushd. It also survives a kill of gpushd, with or without
        // clients of the daemon.
        agent.stop();
        let agent = start(host, programs, &config);
        assert_eq!(reaches(&agent, "0", MpsState::Ready).pid, ready.pid);
        agent.kill();
        let agent = start(host, programs, &config);
        let again = reaches(&agent, "0", MpsState::Ready);
        assert_eq!((again.pid, &again.leases, &again.pipe_directory), (ready.pid, &seen.leases, &seen.pipe_directory));
        assert_eq!((again.clients, controls(&base(host))), (seen.clients, vec![pid]));
        assert!(client.lives() && client.printed().is_empty(), "a client does not notice");
        client.end();
        becomes(&agent, "0", "without clients", |daemon| daemon.clients.is_empty());
        // gpushd also adopts a daemon without clients.
        agent.kill();
        let agent = start(host, programs, &config);
        let idle = becomes(&agent, "0", "ready and seen by the driver", |daemon| {
            daemon.state == MpsState::Ready && daemon.gpu.is_some()
        });
        assert_eq!((idle.pid, controls(&base(host))), (ready.pid, vec![pid]));
        // If the daemon is killed, gpushd starts another one with a clean directory. If the daemon
        // ended during gpushd's operation at its start, the operation would fail.
        let _begun = agent.settle();
        assert!(signal(pid, Signal::SIGKILL));
        let second = becomes(&agent, "0", "ready with another pid", |daemon| {
            daemon.state == MpsState::Ready && daemon.pid != ready.pid
        });
        assert_eq!(controls(&base(host)), [second.pid.expect("a pid").cast_signed()]);
        assert_eq!(second.failures, 1, "{}", agent.log());
        assert!(parts(&base(host)).iter().all(|part| part.role == Role::Control));
        end_leases(&agent, "0");
        assert_eq!(act(&agent, "0", "stop", &json!({})).status, 200);
        reaches(&agent, "0", MpsState::Stopped);
        assert_eq!(parts(&base(host)), []);
    });
}

#[test]
fn stop_with_clients_is_refused_and_stop_persists() {
    both("a stop of NVIDIA's own MPS daemon", |host, programs| {
        let agent = start(host, programs, &config(""));
        let first = reaches(&agent, "0", MpsState::Ready);
        let environment = lease(&agent, "0", &json!({})).expect("a lease").environment;
        let client = Client::start(host, &environment);
        for verb in ["stop", "restart"] {
            let error = act(&agent, "0", verb, &json!({})).error();
            assert_eq!(error.code, Code::Blocked, "{error:?}");
            assert!(error.causes.iter().any(|cause| cause.contains(&format!("pid {}", client.pid()))), "{error:?}");
            assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("mps stop 0 --wait")), "{error:?}");
        }
        assert_eq!(daemon(&agent, "0").pid, first.pid);
        let mut client = client;
        assert!(client.lives());

        // A forced restart ends the clients, and starts another daemon.
        assert_eq!(act(&agent, "0", "restart", &json!({ "force": true })).status, 200);
        let second = becomes(&agent, "0", "ready with another pid", |daemon| {
            daemon.state == MpsState::Ready && daemon.pid != first.pid
        });
        assert_eq!(controls(&base(host)), [second.pid.expect("a pid").cast_signed()]);
        assert!(["terminated", "lost"].contains(&client.says().as_str()));
        drop(client);

        // During a drain, present clients continue, and new clients get no access.
        let client = Client::start(host, &environment);
        assert!(client.first.starts_with("active"), "{}", client.first);
        assert_eq!(act(&agent, "0", "drain", &json!({ "end_after_s": 3600 })).status, 200);
        let draining = reaches(&agent, "0", MpsState::Draining);
        assert!(
            draining.reasons.iter().any(|reason| reason.contains("the leases on its GPU or MIG device and its client")),
            "{draining:#?}"
        );
        assert_eq!(lease(&agent, "0", &json!({})).unwrap_err().code, Code::Conflict);
        client.end();
        assert_eq!(act(&agent, "0", "drain", &json!({ "end_after_s": 1 })).status, 200);
        reaches(&agent, "0", MpsState::Stopped);
        assert_eq!(parts(&base(host)), []);

        // If a user has stopped the daemon, it stays stopped until a request starts it. A restart
        // or a kill of gpushd does not start it.
        agent.stop();
        let agent = start(host, programs, &config(""));
        agent.await_that("the GPU of the target is known", || daemons(&agent).iter().any(|one| one.gpu.is_some()));
        agent.settle_reads();
        assert_eq!(daemon(&agent, "0").state, MpsState::Stopped);
        agent.kill();
        let agent = start(host, programs, &config(""));
        agent.await_that("the GPU of the target is known", || daemons(&agent).iter().any(|one| one.gpu.is_some()));
        // Until gpushd has read the GPUs, it knows the target only by the target's directory.
        agent.await_that("the hint names the command that starts it", || {
            let refused = lease(&agent, "0", &json!({})).expect_err("the daemon is stopped");
            refused.hint.is_some_and(|hint| hint.contains("gpushctl mps start 0"))
        });
        assert_eq!(controls(&base(host)), [0; 0]);
        assert_eq!(act(&agent, "0", "start", &json!({})).status, 200);
        let third = reaches(&agent, "0", MpsState::Ready);
        assert_eq!(controls(&base(host)), [third.pid.expect("a pid").cast_signed()]);
        assert_eq!(third.leases.len(), 1, "a lease outlives its daemon");
    });
}

#[test]
fn settings_take_effect_at_once_for_new_clients() {
    both("settings of NVIDIA's own MPS daemon", |host, programs| {
        let agent = start(host, programs, &config(""));
        reaches(&agent, "0", MpsState::Ready);
        let environment = lease(&agent, "0", &json!({})).expect("a lease").environment;
        let bare: Vec<_> = environment.into_iter().filter(|(name, _)| !name.contains("PERCENTAGE")).collect();
        let first = Client::start(host, &bare);
        assert_eq!(first.word("percentage"), "100.0");
        let set = |body: Value| agent.post("/v1/mps/0/settings", &body);
        let answer = set(json!({ "percentage": 33.3, "memory_limit_mib": 1536 })).json();
        assert_eq!(
            answer["daemon"]["effective_settings"],
            json!({ "percentage": 33.3, "memory_limit_mib": 1536, "priority": "normal" })
        );
        let trail = agent.get("/v1/audit").json();
        let set_as =
            trail.as_array().expect("records").iter().find(|one| one["action"] == "mps.set").expect("a record");
        assert_eq!(set_as["detail"]["percentage"], 33.3, "{set_as}");
        assert_eq!((&set_as["detail"]["memory_limit_mib"], set_as["detail"].get("priority")), (&json!(1536), None));
        let reaches_text = answer["reaches"].to_string();
        assert!(
            reaches_text.contains("the clients that run now (1)") && reaches_text.contains("keeps its memory limit"),
            "{reaches_text}"
        );
        let second = Client::start(host, &bare);
        assert_eq!(second.word("percentage"), "33.3", "the running server has it, too");
        for (bad, why) in [
            (json!({ "percentage": 0 }), "percentage"),
            (json!({ "percentage": 101 }), "percentage"),
            (json!({ "percentage": "NaN" }), "percentage"),
            (json!({ "percentage": null, "memory_limit_mib": 0 }), "memory"),
            (json!({ "memory_limit_mib": "1.5G" }), "memory"),
            (json!({ "memory_limit_mib": 24 * 1024 }), "memory"),
            (json!({ "memory_limit_mib": u64::MAX }), "memory"),
        ] {
            let error = set(bad.clone()).error();
            assert_eq!(error.code, Code::BadRequest, "{bad}: {error:?}");
            let words = format!("{error:?}").to_lowercase();
            assert!(words.contains(why), "{bad}: {error:?}");
        }
        let now = daemon(&agent, "0");
        assert_eq!(now.in_force.as_ref().map(|settings| settings.percentage.to_string()).as_deref(), Some("33.3"));

        // When the rule changes, the settings of the new rule replace the settings that users have
        // changed by request.
        agent.write_config(config("mps = { percentage = 60 }\n"));
        agent.signal(Signal::SIGHUP);
        let other = becomes(&agent, "0", "with the settings of the new rule", |daemon| {
            daemon.in_force.as_ref().is_some_and(|settings| settings.percentage.to_string() == "60")
        });
        assert_eq!((other.pid, other.wanted.settings.memory_limit_mib), (now.pid, None));
        let third = Client::start(host, &bare);
        assert_eq!(third.word("percentage"), "60.0");
        first.end();
        second.end();
        third.end();
        agent.stop();
        let agent = start(host, programs, &config("mps = { percentage = 60 }\n"));
        let kept = reaches(&agent, "0", MpsState::Ready);
        assert_eq!((kept.pid, kept.in_force), (now.pid, other.in_force));
    });
}
