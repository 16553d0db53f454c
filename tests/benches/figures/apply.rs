//! Driver calls and duration of a layout change: with gpush, and with the method "permute and
//! retry" on the same simulated driver.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpush_geometry::Model;
use gpush_tests::{
    agent::Agent,
    host::{Host, Traced},
};
use serde_json::Value;

use crate::{
    ctl::{self, ctl, must},
    minimum::{Instance, Minimum, minimum},
    permute::Wanted,
    report::Report,
};

const MODEL: &str = "a100-80";

/// A change from one layout to another, on one GPU.
struct Case {
    from: &'static str,
    to: &'static [&'static str],
    /// Profile of the instance of `from` that a process uses.
    busy: Option<&'static str>,
}

const fn case(from: &'static str, to: &'static [&'static str]) -> Case {
    Case { from, to, busy: None }
}

const CASES: &[Case] = &[
    case("none", &["3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb"]),
    case("none", &["1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb"]),
    case("none", &["1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "3g.40gb"]),
    case("none", &["1g.10gb", "1g.10gb", "1g.10gb", "2g.20gb", "2g.20gb"]),
    case("none", &["1g.10gb+me", "1g.20gb", "2g.20gb", "2g.20gb"]),
    case("7g.80gb", &["4g.40gb", "3g.40gb"]),
    case("3g.40gb*2", &["3g.40gb", "2g.20gb", "1g.10gb"]),
    case("3g.40gb,2g.20gb,1g.10gb*2", &["3g.40gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"]),
    case("1g.10gb*7", &["2g.20gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"]),
    case("1g.10gb*7", &["1g.10gb", "1g.10gb", "1g.10gb", "4g.40gb"]),
    case("2g.20gb*3,1g.10gb", &["2g.20gb", "2g.20gb", "3g.40gb"]),
    case("none", &["2g.20gb", "1g.20gb", "1g.20gb", "1g.10gb", "1g.10gb", "1g.10gb"]),
    Case {
        from: "3g.40gb@4,2g.20gb@0,1g.10gb@2",
        to: &["3g.40gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"],
        busy: Some("3g.40gb"),
    },
];

#[derive(Debug, Default)]
struct Cost {
    creates: usize,
    destroys: usize,
    failed: usize,
    reached: bool,
    took: Duration,
}

/// Counts the driver calls on one host. Compares the durations on another host, whose driver has
/// the latencies of real hardware.
pub(crate) fn run() -> Report {
    let model = gpush_geometry::model(MODEL).expect("the model is known");
    let counted = Host::up(&format!("[[gpu]]\nmodel = \"{MODEL}\"\n"));
    let timed = Host::up(&format!("latencies = true\n\n[[gpu]]\nmodel = \"{MODEL}\"\n"));
    let (agent, slow_agent) = (ctl::agent(&counted), ctl::agent(&timed));
    let mut report = Report::new(
        "Driver calls of an apply",
        "The GPU is a simulated A100 80GB. The columns `minimum`, `gpush` and `permute and retry` show `creates + \
         destroys`: how many calls create and destroy a GPU instance or compute instance, including failed calls. \
         `minimum` comes from a search through every subset of kept instances and every placement. `permute and retry` \
         is a client that first destroys all instances. It then tries one order of creation after the other, and the \
         driver chooses the placements. `time` is the duration of this client divided by the duration of gpush, with \
         the latencies of real hardware.",
        &["from", "to", "minimum", "gpush", "failed", "permute and retry", "failed", "time"],
    );
    let (mut wasteful, mut failed) = (0, 0);
    let mut times = Vec::new();
    for case in CASES {
        let (least, ours) = once(&counted, &agent, &model, case, false);
        let (_, theirs) = once(&counted, &agent, &model, case, true);
        let exact = least.map(|least| (2 * least.creates, 2 * least.destroys));
        let as_proven = match exact {
            Some(exact) => ours.reached && (ours.creates, ours.destroys) == exact,
            None => !ours.reached && ours.creates + ours.destroys == 0,
        };
        wasteful += usize::from(!as_proven);
        failed += ours.failed;
        let ratio = if least.is_some() && theirs.reached {
            let (_, ours) = once(&timed, &slow_agent, &model, case, false);
            let (_, theirs) = once(&timed, &slow_agent, &model, case, true);
            times.push(theirs.took.as_secs_f64() / ours.took.as_secs_f64());
            times.last().map_or_else(String::new, |ratio| format!("{ratio:.1}"))
        } else {
            "-".into()
        };
        report.rows.push(vec![
            describe(case),
            counted_names(case.to),
            exact.map_or_else(|| "impossible".into(), |(creates, destroys)| format!("{creates} + {destroys}")),
            printed(&ours),
            ours.failed.to_string(),
            printed(&theirs),
            theirs.failed.to_string(),
            ratio,
        ]);
    }
    let cases = CASES.len();
    report.target(
        "creates and destroys of an apply",
        "exactly the proven minimum",
        &format!("{} of {cases} changes", cases - wasteful),
        wasteful == 0,
    );
    report.target("failed driver calls", "none", &failed.to_string(), failed == 0);
    report
}

/// Abbreviates equal adjacent names as `1g.10gb*2`.
fn counted_names(names: &[&str]) -> String {
    let runs = names.chunk_by(|a, b| a == b).map(|run| match run.len() {
        1 => run[0].to_owned(),
        count => format!("{}*{count}", run[0]),
    });
    runs.collect::<Vec<_>>().join(" ")
}

fn describe(case: &Case) -> String {
    match case.busy {
        Some(profile) => format!("{}, {profile} in use", case.from.replace(',', " ")),
        None => case.from.replace(',', " "),
    }
}

fn printed(cost: &Cost) -> String {
    let counts = format!("{} + {}", cost.creates, cost.destroys);
    match (cost.reached, cost.creates + cost.destroys) {
        (true, _) => counts,
        (false, 0) => "refused, nothing touched".into(),
        (false, _) => format!("{counts}, not reached"),
    }
}

/// Makes one change, with gpush or with "permute and retry", on a host that has the start layout.
fn once(host: &Host, agent: &Agent, model: &Model, case: &Case, permute: bool) -> (Option<Minimum>, Cost) {
    must(host, agent, &["mig", "apply", "--gpu", "0", "--layout", "none"]);
    if case.from != "none" {
        must(host, agent, &["mig", "apply", "--gpu", "0", "--layout", case.from]);
    }
    let (standing, worker) = standing(host, agent, case);
    host.start_trace();
    let started = Instant::now();
    let ended = if permute {
        other_client(host, model, case).output()
    } else {
        ctl(host, agent, &["mig", "apply", "--gpu", "0", "--layout", &case.to.join(",")]).output()
    };
    let took = started.elapsed();
    let ended = ended.expect("the program can be started");
    if let Some(pid) = worker {
        host.end_process(pid);
    }
    let cost = Cost { reached: ended.status.success(), took, ..count(&host.trace()) };
    (minimum(model, &standing, case.to), cost)
}

fn count(trace: &[Traced]) -> Cost {
    let mut cost = Cost::default();
    for call in trace {
        cost.creates += usize::from(call.function.contains("Create"));
        cost.destroys += usize::from(call.function.contains("Destroy"));
        cost.failed += usize::from(call.rc != 0);
    }
    cost
}

/// Returns the existing instances, and the pid of the process that uses one of them.
fn standing(host: &Host, agent: &Agent, case: &Case) -> (Vec<Instance>, Option<u32>) {
    let shown = must(host, agent, &["gpu", "show", "0", "--json"]);
    let gpus: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
    let mut worker = None;
    let mut found = Vec::new();
    for instance in gpus[0]["mig"]["instances"].as_array().expect("instances") {
        let profile = instance["profile"].as_str().expect("a profile").to_owned();
        let start = instance["placement"]["start"].as_u64().and_then(|start| u8::try_from(start).ok());
        let busy = worker.is_none() && case.busy == Some(profile.as_str());
        if busy {
            worker = Some(host.process(&format!("--gpu 0 --gi {} --ci 0", instance["gi"])));
        }
        found.push(Instance { profile, start: start.expect("a start"), busy });
    }
    (found, worker)
}

/// Returns a command that runs this program as the client "permute and retry".
fn other_client(host: &Host, model: &Model, case: &Case) -> Command {
    let mut command = host.command(std::env::current_exe().expect("a bench knows its path"));
    command.arg("permute").arg(host.library()).arg(wanted_text(model, case.to)).stdin(Stdio::null());
    command
}

/// Returns `gpu:compute` profile ids, one for each requested instance.
fn wanted_text(model: &Model, wanted: &[&str]) -> String {
    let ids = wanted.iter().map(|name| {
        let all = all_profiles(model);
        let (_, (gpu, compute)) = all.into_iter().find(|(known, _)| known == name).expect("a known profile");
        format!("{gpu}:{compute}")
    });
    ids.collect::<Vec<_>>().join(",")
}

/// Returns each GPU instance profile with two ids: the id of this profile, and the id of the
/// compute instance profile that fills the whole GPU instance.
fn all_profiles(model: &Model) -> Vec<(String, (u32, u32))> {
    let ids = model.gi_profiles.iter().filter_map(|profile| {
        let whole = profile.compute.iter().find(|compute| compute.name == profile.name)?;
        Some((profile.name.clone(), (profile.id, whole.id)))
    });
    ids.collect()
}

/// Runs the client "permute and retry".
pub(crate) fn permute_main(arguments: &[String]) -> Result<(), String> {
    let [library, wanted] = arguments else { return Err("permute LIBRARY GPU:COMPUTE,…".into()) };
    let model = gpush_geometry::model(MODEL).ok_or("the model is not known")?;
    let texts: Vec<&str> = wanted.split(',').collect();
    let mut list = Vec::new();
    for text in &texts {
        let (gpu, compute) = text.split_once(':').ok_or("not GPU:COMPUTE")?;
        let rank = texts.iter().position(|other| other == text).unwrap_or_default();
        let number = |text: &str| text.parse().map_err(|_| format!("`{text}` is no profile id"));
        list.push(Wanted { rank, gpu_profile: number(gpu)?, compute_profile: number(compute)? });
    }
    let known: Vec<Wanted> = all_profiles(&model)
        .into_iter()
        .map(|(_, (gpu_profile, compute_profile))| Wanted { rank: 0, gpu_profile, compute_profile })
        .collect();
    crate::permute::apply(std::path::Path::new(library), 0, &known, &list).map_err(|stuck| stuck.0)
}
