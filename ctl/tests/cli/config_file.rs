//! Commands while the config file differs from the config that gpushd has loaded.

use gpush_api::{
    ApiError, Code, ConfigDiff, DesiredView, Driver, Gpu, GpuDiff, GpuIndex, Health, HealthStatus, Mode, Plans,
    Reloaded, SettingDiff, Version,
};

use crate::support::{Agent, Answer, Host};

fn version() -> Version {
    let text = String::new;
    let driver =
        Driver { version: text(), nvml: text(), cuda: text(), library: text(), simulated: false, memory_limits: false };
    Version { agent: "9.8.7".into(), api: "v1".into(), driver: Some(driver) }
}

fn health(config_file_changed: bool) -> Health {
    Health {
        status: HealthStatus::Ok,
        errors: Vec::new(),
        simulated: false,
        gpu_count: 1,
        maintenance: None,
        config_file_changed,
        layouts_at_start: None,
        tasks: Vec::new(),
        pid: 812,
    }
}

/// Returns a GPU that has its desired state.
fn gpus() -> Vec<Gpu> {
    let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(1);
    gpus[0].mode = Mode::Exclusive;
    gpus
}

fn reloaded() -> Reloaded {
    let setting = SettingDiff {
        key: "log.level".into(),
        in_force: Some("\"info\"".into()),
        in_file: Some("\"debug\"".into()),
        restart: false,
    };
    Reloaded {
        path: Some("/etc/gpush/config.toml".into()),
        settings: vec![setting],
        gpus: Vec::new(),
        ended: Vec::new(),
        findings: Vec::new(),
        generation: 2,
    }
}

/// Returns the difference between the file and the loaded config, whose rule manages the GPU. In the file, the GPU has
/// the mode `in_file`.
fn diff(in_file: Mode) -> ConfigDiff {
    let view =
        |mode| DesiredView { mode, rule: None, layout: None, mps: None, timeslice: None, lease: None, access: None };
    let gpu = GpuDiff {
        gpu: GpuIndex(0),
        gpu_uuid: gpus()[0].uuid.clone(),
        in_file: Some(view(in_file)),
        in_force: view(Mode::Exclusive),
        overridden: None,
        stands: None,
        drift: Vec::new(),
        pending: Vec::new(),
        drift_known: true,
    };
    ConfigDiff {
        path: Some("/etc/gpush/config.toml".into()),
        trouble: None,
        settings: Vec::new(),
        gpus: vec![gpu],
        unseen: Vec::new(),
        generation: 1,
    }
}

/// Starts an agent whose config file has changed if `changed` is set.
fn agent(host: &Host, changed: bool) -> Agent {
    agent_with(host, changed, diff(Mode::Exclusive))
}

fn agent_with(host: &Host, changed: bool, diff: ConfigDiff) -> Agent {
    Agent::listen(&host.path("gpushd.sock"), move |request| match request.path.as_str() {
        "/v1/config/diff" => Answer::ok(&diff),
        "/v1/version" => Answer::ok(&version()),
        "/v1/health" => Answer::ok(&health(changed)),
        "/v1/config/reload" => Answer::ok(&reloaded()),
        "/v1/gpus" => Answer::ok(&gpus()),
        "/v1/mig/plan" => Answer::ok(&Plans { plans: Vec::new() }),
        path => Answer::error(&ApiError::new(Code::NotFound, format!("there is no {path}"))),
    })
}

/// Returns the output without its line breaks.
fn words(output: &str) -> String {
    output.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn apply_loads_a_changed_config_file_first() {
    let host = Host::new();
    let agent = agent(&host, true);
    let output = host.run(&["apply"]);
    assert!(output.contains("/etc/gpush/config.toml: loaded") && output.contains("log.level"), "{output}");
    assert!(output.contains("Every GPU has its desired state."), "{output}");
    // The first two requests show whether gpushd has finished its start.
    let asked = &agent.asked()[2..6];
    assert_eq!(asked, ["GET /v1/health", "GET /v1/config/diff", "POST /v1/config/reload", "GET /v1/gpus"]);
}

#[test]
fn apply_does_not_load_an_unchanged_config_file() {
    let host = Host::new();
    let agent = agent(&host, false);
    let output = host.run(&["apply"]);
    assert!(!output.contains("loaded"), "{output}");
    assert_eq!(agent.asked()[2..4], ["GET /v1/health", "GET /v1/gpus"]);
}

#[test]
fn dry_run_says_that_it_plans_for_the_loaded_config() {
    let host = Host::new();
    let agent = agent(&host, true);
    let output = words(&host.run(&["apply", "0", "--dry-run"]));
    assert!(output.contains("this plan is for the loaded config"), "{output}");
    assert!(!agent.asked().iter().any(|request| request.contains("reload")), "{:?}", agent.asked());
}

#[test]
fn status_and_refusals_say_that_the_config_file_has_changed() {
    for changed in [true, false] {
        let host = Host::new();
        let _agent = agent(&host, changed);
        let says =
            |args: &[&str]| words(&host.run(args)).contains("the config file has changed since gpushd loaded it");
        assert_eq!(says(&["status"]), changed);
        assert_eq!(says(&["lease", "show", "L9"]), changed);
    }
}

/// Another program may be writing the file, or have removed it.
#[test]
fn apply_does_not_load_a_file_without_rules_or_with_errors() {
    let without_rules = diff(Mode::NoRule);
    let trouble = ApiError::new(Code::ConfigInvalid, "the config has errors").hint("correct the file");
    let with_errors = ConfigDiff { trouble: Some(trouble), ..diff(Mode::Exclusive) };
    for (diff, why) in [(without_rules, "no rule for a GPU"), (with_errors, "the config has errors")] {
        let host = Host::new();
        let agent = agent_with(&host, true, diff);
        let output = words(&host.run(&["apply"]));
        assert!(output.contains("This command applies the loaded config") && output.contains(why), "{output}");
        assert!(!output.contains("[exit 0]"), "the file is not in force: {output}");
        let program = host.run(&["apply", "--json"]);
        assert!(program.contains(why) && !program.contains("[exit 0]"), "{program}");
        assert!(!agent.asked().iter().any(|request| request.contains("reload")), "{:?}", agent.asked());
    }
}
