use gpush_api::{
    AtLeaseEnd, ComputeMode, EnforceMissing, GpuIndex, LeaseKind, LeaseOwner, LeaseRequirement, MemoryLimit, Mode,
    MpsComputeMode, MpsPolicy, MpsSettings, MpsUsers, Priority, TimesliceLevel, TimeslicePolicy, UnleasedPolicy,
};
use proptest::prelude::*;

use super::super::*;
use crate::lease::{
    placement::PlacementPolicy,
    quota::{Limits, MemoryAmount, Subject},
    user_limits::UserLimits,
};

const WHOLE: &str = r#"
auto_reconcile = true
log.level = "debug"

[driver]
library = "/opt/driver/libnvidia-ml.so.1"

[api]
admin_socket = "/run/gpush/root.sock"

[access]
admin_groups = ["gpuadmin", "wheel"]

[health]
cordon_xids = [95, 79, 79]
poll = "0"

[mps]
control = "/opt/mps/control"
health = "1m 30s"

[processes]
unleased = "end"
allow = [{ exe = "/usr/bin/nvtop" }, { exe = "/usr/bin/nvtop", uid = 1000 }, { uid = 0 }]

[leases]
placement = "spread"
user_limits = "require"

[slurm]
agent_down = "pass"
busy = "fail"
leftovers = "report"
unattributed = "drain"

[[quota]]
users = ["alice", "bob"]
groups = ["staff"]
kinds = ["mps", "mig"]
leases = 4
waiting = 0
memory = "1.5 gpu"
mps_percentage = 150
longest = "2d12h"
gpus = ["0-1", "*A30*"]

[[quota]]
groups = ["students"]
memory = "40g"
gpus = "all"

[[quota]]
everybody = true
memory = "37.5 %"
leases = 1

[layouts]
halves = ["3g.40gb*2"]
text = "3G.40GB, 2g.20gb"
split = ["1c.3g.40gb*3", "1g.10gb@4"]

[[gpu]]
name = "training"
match = ["0-1", "GPU-3a"]
mode = "mig"
layout = "halves"

[[gpu]]
match = ["07:00.0"]
mode = "mig"
layout = ["1g.10gb*7"]

[[gpu]]
match = ["*A30*"]
mode = "mig"
layout = "1g.6gb*4"

[[gpu]]
match = "3"
mode = "mig"
layout = "none"

[[gpu]]
match = ["4"]
mode = "mig"
layout = ["2g.20gb*2:mps", "1c.3g.40gb:MPS"]
mps = { percentage = "12.5%", memory = "1536M", max_clients = 60 }

[[gpu]]
match = ["5"]
mode = "mps"

[[gpu]]
match = ["6"]
mode = "mps"
[gpu.mps]
percentage = 33.3
memory = "8G"
priority = "below-normal"
max_clients = 1
total_percentage = 10000
users = "many"
compute_mode = "keep"

[[gpu]]
match = ["7"]
mode = "timeslice"

[[gpu]]
match = ["8"]
mode = "timeslice"
[gpu.timeslice]
replicas = 1000
level = "long"
compute_mode = "keep"

[[gpu]]
match = ["2"]
mode = "mig"
layout = "Dynamic"
lease = "required"
at_end = "end"
owner = "slurm"

[[gpu]]
match = ["*L4*"]
mode = "exclusive"

[[gpu]]
match = ["all"]
mode = "unmanaged"
"#;

#[test]
fn every_key_is_read() {
    let config = Config::parse(WHOLE, "config.toml").unwrap_or_else(|e| panic!("{e}"));
    assert!(config.auto_reconcile);
    assert_eq!(config.log.level, LogLevel::Debug);
    assert_eq!(config.driver.library, "/opt/driver/libnvidia-ml.so.1");
    assert_eq!(config.api, Api { admin_socket: Some("/run/gpush/root.sock".to_owned()) });
    assert_eq!(config.access.admin_groups, ["gpuadmin", "wheel"]);
    assert_eq!(config.health, Health { cordon_xids: vec![79, 95], poll: Duration::ZERO });
    assert_eq!(config.layouts["text"].to_string(), "3g.40gb,2g.20gb");
    let modes: Vec<Mode> = config.rules.iter().map(|rule| rule.mode).collect();
    let first = [Mode::Mig, Mode::Mig, Mode::Mig, Mode::Mig, Mode::Mig, Mode::Mps, Mode::Mps];
    assert_eq!(modes[..7], first);
    assert_eq!(modes[7..], [Mode::Timeslice, Mode::Timeslice, Mode::Mig, Mode::Exclusive, Mode::Unmanaged]);
    let layouts: Vec<Option<String>> =
        config.rules.iter().map(|rule| config.layout_of(rule).map(|layout| layout.to_string())).collect();
    let expected = ["3g.40gb*2", "1g.10gb*7", "1g.6gb*4", "none", "2g.20gb*2:mps,1c.3g.40gb:mps"];
    assert_eq!(layouts[..5], expected.map(|text| Some(text.to_owned())));
    assert!(layouts[5..].iter().all(Option::is_none));
    assert_eq!(config.rules[0].label(0), "training");
    assert_eq!(config.rules[1].label(1), "rule 2");
}

#[test]
fn mps_policy_of_a_rule_is_read() {
    let config = Config::parse(WHOLE, "config.toml").unwrap();
    let policy = |rule: usize| config.rules[rule].mps_policy();
    assert_eq!((policy(5), &config.rules[5].mps), (MpsPolicy::default(), &Some(MpsPolicy::default())));
    let settings = MpsSettings {
        percentage: "33.3".parse().unwrap(),
        memory_limit_mib: MemoryLimit::of_mib(8192),
        priority: Priority::BelowNormal,
    };
    let (users, compute_mode) = (MpsUsers::Many, MpsComputeMode::Keep);
    assert_eq!(policy(6), MpsPolicy { settings, max_clients: 1, total_percentage: 10_000, users, compute_mode });
    // On a MIG device, gpushd cannot set a compute mode.
    let cut = policy(4);
    assert_eq!((cut.settings.percentage.tenths(), cut.compute_mode), (125, MpsComputeMode::Keep));
    assert!(config.rules[0].mps.is_none() && policy(0).compute_mode == MpsComputeMode::Keep);
    let views = config.view(None, &[]).rules;
    assert_eq!((&views[0].mps, &views[4].mps), (&None, &Some(cut)));
}

#[test]
fn timeslice_policy_of_a_rule_is_read() {
    let config = Config::parse(WHOLE, "config.toml").unwrap();
    let turns = |rule: usize| config.rules[rule].timeslice.clone();
    assert_eq!((turns(6), turns(7)), (None, Some(TimeslicePolicy::default())));
    let level = TimesliceLevel::Long;
    assert_eq!(turns(8), Some(TimeslicePolicy { replicas: 1000, level, compute_mode: None }));
    assert_eq!(config.view(None, &[]).rules[8].timeslice, turns(8));
    for (mode, name) in [(ComputeMode::Prohibited, "prohibited"), (ComputeMode::ExclusiveProcess, "exclusive_process")]
    {
        let text =
            format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = {{ compute_mode = \"{name}\" }}\n");
        let config = Config::parse(&text, "config.toml").unwrap();
        assert_eq!(config.rules[0].timeslice.as_ref().unwrap().compute_mode, Some(mode));
        assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config);
    }
}

#[test]
fn rule_lease_terms_have_defaults_by_mode() {
    let config = Config::parse(WHOLE, "config.toml").unwrap();
    let terms = |rule: usize| config.rules[rule].lease.map(|terms| (terms.requirement, terms.at_end, terms.owner));
    let (report, users) = (AtLeaseEnd::Report, LeaseOwner::Users);
    assert_eq!(terms(0), Some((None, report, users)), "in mode mig the default depends on the device");
    assert_eq!(terms(5), Some((Some(LeaseRequirement::Required), report, users)));
    assert_eq!(terms(7), Some((Some(LeaseRequirement::Optional), report, users)));
    assert_eq!(terms(9), Some((Some(LeaseRequirement::Required), AtLeaseEnd::End, LeaseOwner::Slurm)));
    assert_eq!(terms(11), None);
    assert!(config.rules[9].is_dynamic() && !config.rules[0].is_dynamic());
    let view = &config.view(None, &[]).rules[9];
    assert_eq!((&view.layout, view.lease), (&Some(vec!["dynamic".to_owned()]), config.rules[9].lease));
}

#[test]
fn quotas_are_resolved_for_the_host() {
    let config = Config::parse(WHOLE, "config.toml").unwrap();
    assert_eq!(config.leases.placement, PlacementPolicy::Spread);
    assert_eq!(config.leases.user_limits, UserLimits::Require);
    let quotas = config.quotas(&crate::preset::gpus("dgx-a100").unwrap());
    let user = |name: &str| Subject::User(name.to_owned());
    let group = |name: &str| Subject::Group(name.to_owned());
    let subjects: Vec<Subject> = quotas.iter().map(|quota| quota.subject.clone()).collect();
    assert_eq!(subjects, [user("alice"), user("bob"), group("staff"), group("students"), Subject::Everybody]);
    let limits = Limits {
        kinds: Some([LeaseKind::Mig, LeaseKind::Mps].into()),
        leases: Some(4),
        queued: Some(0),
        memory: Some(MemoryAmount::Gpus(1500)),
        mps_tenths: Some(1500),
        longest_s: Some(216_000),
        gpus: Some([0, 1].map(GpuIndex).into()),
    };
    assert!(quotas[..3].iter().all(|quota| quota.limits == limits), "{quotas:?}");
    let limits = Limits {
        memory: Some(MemoryAmount::Mib(40 * 1024)),
        gpus: Some((0..8).map(GpuIndex).collect()),
        ..Limits::default()
    };
    assert_eq!(quotas[3].limits, limits);
    // 37.5 % of 8 GPUs is 3000 thousandths of a GPU.
    assert_eq!(quotas[4].limits.memory, Some(MemoryAmount::Gpus(3000)));
    assert!(Config::default().quotas(&[]).is_empty());
}

#[test]
fn each_key_of_a_quota_has_an_effect() {
    let keys = [
        "users = [\"alice\"]",
        "groups = [\"staff\"]",
        "everybody = true",
        "kinds = [\"whole\"]",
        "leases = 1",
        "waiting = 1",
        "memory = \"2 GPUs\"",
        "mps_percentage = 1",
        "longest = \"1h\"",
        "gpus = [\"all\"]",
        "default = \"mps=25,for=90m\"",
    ];
    let plain = Config::parse("[[quota]]\nusers = [\"bob\"]\n", "config.toml").unwrap();
    for line in keys {
        let base = if line.starts_with("users") { "" } else { "users = [\"bob\"]\n" };
        let config = Config::parse(&format!("[[quota]]\n{base}{line}\n"), "config.toml").unwrap();
        assert!(!plain.differences(&config).is_empty(), "{line}");
        assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config, "{line}");
    }
    let tried: Vec<&str> = keys.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(tried, schema::QUOTA.keys);
}

#[test]
fn duration_is_a_string_in_the_notation_of_commands() {
    for (text, seconds) in [("90s", 90), ("1m30s", 90), ("1m 30s", 90), ("2 minutes", 120), ("1h", 3600)] {
        let config = Config::parse(&format!("[mps]\nhealth = \"{text}\"\n"), "config.toml").unwrap();
        assert_eq!(config.mps.health.as_secs(), seconds, "{text}");
    }
}

#[test]
fn one_selector_needs_no_list() {
    let rule = |gpus: &str| {
        let text = format!("[[gpu]]\nmatch = {gpus}\nmode = \"exclusive\"\n");
        Config::parse(&text, "config.toml").unwrap().rules
    };
    assert_eq!(rule("\"0-3\""), rule("[\"0-3\"]"));
}

/// A GPU of mode `unmanaged` has no leases, so the defaults do not concern its rule.
#[test]
fn rules_have_the_defaults_unless_they_set_the_key() {
    let rule = |gpu: u32, rest: &str| format!("[[gpu]]\nmatch = \"{gpu}\"\n{rest}\n");
    let text = [
        "[defaults]\nlease = \"required\"\nat_end = \"end\"\nowner = \"slurm\"\n".to_owned(),
        rule(0, "mode = \"exclusive\""),
        rule(1, "mode = \"mig\"\nlayout = \"none\"\nat_end = \"report\""),
        rule(2, "mode = \"mps\"\nlease = \"optional\"\nowner = \"users\""),
        rule(3, "mode = \"unmanaged\""),
    ];
    let config = Config::parse(&text.concat(), "config.toml").unwrap();
    let terms = |rule: usize| config.rules[rule].lease.map(|terms| (terms.requirement, terms.at_end, terms.owner));
    let (required, slurm) = (Some(LeaseRequirement::Required), LeaseOwner::Slurm);
    assert_eq!(terms(0), Some((required, AtLeaseEnd::End, slurm)));
    assert_eq!(terms(1), Some((required, AtLeaseEnd::Report, slurm)));
    assert_eq!(terms(2), Some((Some(LeaseRequirement::Optional), AtLeaseEnd::End, LeaseOwner::Users)));
    assert_eq!(terms(3), None);
    assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config);
}

#[test]
fn enforce_is_short_for_three_keys_of_all_rules() {
    let rules = "[[gpu]]\nmatch = \"0\"\nmode = \"exclusive\"\n[[gpu]]\nmatch = \"1\"\nmode = \"mig\"\nlayout = \"none\"\n\
                 lease = \"optional\"\n[[gpu]]\nmatch = \"2\"\nmode = \"unmanaged\"\n";
    let parse = |head: &str| {
        let config = Config::parse(&format!("{head}{rules}"), "config.toml").unwrap();
        assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config, "{head}");
        config
    };
    let of = |head: &str, rule: usize| {
        let config = parse(head);
        let terms = config.rules[rule].lease.map(|terms| (terms.requirement, terms.at_end, terms.enforce_missing));
        (terms, config.processes.unleased)
    };
    let enforced = Some(LeaseRequirement::Enforced);
    let (end, refuse, grant) = (AtLeaseEnd::End, EnforceMissing::Refuse, EnforceMissing::Grant);
    assert_eq!(of("enforce = true\n", 0), (Some((enforced, end, refuse)), UnleasedPolicy::End));
    assert_eq!(of("enforce = true\n", 1).0, Some((Some(LeaseRequirement::Optional), end, refuse)));
    assert_eq!(of("enforce = true\n", 2).0, None);
    let own = "enforce = true\n[processes]\nunleased = \"warn\"\n[defaults]\nat_end = \"report\"\nenforce_missing = \"grant\"\n";
    assert_eq!(of(own, 0), (Some((enforced, AtLeaseEnd::Report, grant)), UnleasedPolicy::Warn));
    assert_eq!(of(own, 1).0.map(|terms| terms.2), Some(refuse), "the rule does not enforce leases");
    assert!(!parse("").enforce && parse("").rules.iter().all(|rule| !rule.lease.is_some_and(|one| one.is_enforced())));
    let same = "[processes]\nunleased = \"end\"\n[defaults]\nlease = \"enforced\"\nat_end = \"end\"\n";
    assert_eq!(parse(same).rules, parse("enforce = true\n").rules);
}

#[test]
fn users_and_groups_of_a_rule_say_who_may_lease() {
    let text = |keys: &str| format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n{keys}");
    let access = |keys: &str| {
        let config = Config::parse(&text(keys), "config.toml").unwrap();
        assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config, "{keys}");
        config.rules[0].access.as_ref().map(ToString::to_string)
    };
    assert_eq!(access(""), None);
    assert_eq!(access("users = [\"anna\"]\n").as_deref(), Some("user anna"));
    assert_eq!(access("groups = [\"ml\", \"bio\"]\nusers = []\n").as_deref(), Some("group ml, group bio"));
}

#[test]
fn effective_config_reads_back_the_same() {
    let mut tried = 0;
    for text in ["", WHOLE, "[layouts]\na = '3g.40gb'", "[access]\nadmin_groups = [\"a\\\"b\"]"] {
        let config = Config::parse(text, "config.toml").unwrap();
        let effective = config.effective();
        assert_eq!(Config::parse(&effective, "effective").unwrap_or_else(|e| panic!("{e}")), config);
        tried += 1;
    }
    println!("{tried} configs written out and read back");
    insta::assert_snapshot!(Config::parse(WHOLE, "config.toml").unwrap().effective());
}

#[test]
fn empty_file_gives_the_default_config() {
    for text in ["", "\n", "# nothing\n", "\u{feff}auto_reconcile = false\r\n"] {
        assert_eq!(Config::parse(text, "config.toml").unwrap(), Config::default(), "{text:?}");
    }
    assert!(Config::default().rules.is_empty());
}

#[test]
fn depth_does_not_exhaust_the_stack() {
    let deep = 100_000;
    let texts = [
        format!("a = {}", "[".repeat(deep)),
        format!("a = {}1{}", "[".repeat(deep), "]".repeat(deep)),
        format!("a = {}", "{ a = ".repeat(deep)),
        format!("{}a = 1", "a.".repeat(deep)),
        format!("[{}a]", "a.".repeat(deep)),
        format!("a = 1\n{}a = 1\na = 2", "a.".repeat(deep)),
    ];
    for text in &texts {
        let errors = Config::parse(text, "config.toml").expect_err("nothing of this is a config");
        assert!(errors.to_string().len() < 100_000, "{}", errors.to_string().len());
    }
    println!("{} deep files", texts.len());
}

proptest! {
    #[test]
    fn garbage_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Err(errors) = Config::from_bytes(&bytes, "config.toml") {
            prop_assert!(!errors.problems().is_empty());
            prop_assert!(errors.to_string().starts_with("config.toml:"));
            let _ = gpush_api::ApiError::from(&errors);
        }
    }

    /// A good file with one part replaced is either accepted, or has errors with positions inside
    /// the file.
    #[test]
    fn damaged_config_never_panics(at in 0..WHOLE.len(), length in 0usize..12, with in "[ -~\n\u{e9}]{0,4}") {
        let mut text = WHOLE.as_bytes().to_vec();
        let end = (at + length).min(text.len());
        text.splice(at..end, with.bytes());
        match Config::from_bytes(&text, "config.toml") {
            Ok(config) => prop_assert_eq!(Config::parse(&config.effective(), "effective").unwrap(), config),
            Err(errors) => {
                let lines = text.split(|b| *b == b'\n').count();
                for place in errors.located() {
                    prop_assert!(place.line <= lines && place.column >= 1, "{:?}", place);
                    prop_assert!(!place.message.is_empty() && !place.hint.is_empty());
                }
                prop_assert!(!errors.to_string().is_empty());
            }
        }
    }
}
