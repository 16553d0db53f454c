use proptest::prelude::*;

use super::*;
use crate::preset;

fn numbers(rule: &str) -> Vec<&'static str> {
    let text = format!("[[gpu]]\nmatch = \"all\"\n{rule}\n");
    let config = Config::parse(&text, "config.toml").unwrap_or_else(|errors| panic!("{errors}"));
    lints(&config).iter().map(|finding| finding.lint.number()).collect()
}

#[test]
fn timeslicing_with_hard_isolation_is_g001() {
    assert_eq!(numbers("mode = \"timeslice\"\ntimeslice = { replicas = 4 }\nisolation = \"hard\""), ["G001"]);
    // One lease at a time has the GPU, so nothing is shared.
    assert!(numbers("mode = \"timeslice\"\nisolation = \"hard\"").is_empty());
    assert!(numbers("mode = \"timeslice\"\ntimeslice = { replicas = 4 }\nisolation = \"shared\"").is_empty());
}

#[test]
fn mps_between_users_who_do_not_trust_each_other_is_g002() {
    assert_eq!(numbers("mode = \"mps\"\nisolation = \"hard\""), ["G002"]);
    assert_eq!(numbers("mode = \"mps\"\nmps = { users = \"many\" }"), ["G002"]);
    assert!(numbers("mode = \"mps\"\nmps = { users = \"many\" }\nisolation = \"shared\"").is_empty());
    assert!(numbers("mode = \"mps\"").is_empty());
    let shared_device = "mode = \"mig\"\nlayout = [\"3g.40gb*2:mps\"]\nlease = \"required\"\nisolation = \"hard\"";
    // MIG separates the devices, and each device has one user at a time.
    assert!(numbers(shared_device).is_empty());
    assert_eq!(numbers(&format!("{shared_device}\nmps = {{ users = \"many\" }}")), ["G002"]);
}

#[test]
fn mps_limits_used_as_hard_limits_are_g004() {
    let limits = "mode = \"mps\"\nmps = { percentage = 50, memory = \"8G\" }";
    assert_eq!(numbers(&format!("{limits}\nisolation = \"hard\"")), ["G002", "G004"]);
    assert_eq!(numbers(&format!("{limits}\nlease = \"optional\"")), ["G004"]);
    assert!(numbers(limits).is_empty());
    assert!(numbers("mode = \"mps\"\nlease = \"optional\"").is_empty());
}

#[test]
fn leases_without_a_memory_limit_are_g005() {
    assert_eq!(numbers("mode = \"timeslice\"\ntimeslice = { replicas = 4 }"), ["G005"]);
    assert_eq!(numbers("mode = \"mps\"\nmps = { percentage = 25 }"), ["G005"]);
    assert!(numbers("mode = \"mps\"\nmps = { percentage = 25, memory = \"8G\" }").is_empty());
    assert!(numbers("mode = \"mps\"\nmps = { percentage = 25 }\nisolation = \"shared\"").is_empty());
    assert!(numbers("mode = \"timeslice\"").is_empty());
}

#[test]
fn ratio_outside_the_usual_range_is_g006() {
    let shared = |replicas: u32, workload: &str| {
        let rule = format!("mode = \"timeslice\"\ntimeslice = {{ replicas = {replicas} }}\nisolation = \"shared\"");
        if workload.is_empty() { numbers(&rule) } else { numbers(&format!("{rule}\nworkload = \"{workload}\"")) }
    };
    for (workload, least, most) in [("inference", 4, 8), ("notebooks", 2, 4), ("training", 1, 1)] {
        for replicas in 1..=10 {
            let is_usual = (least..=most).contains(&replicas);
            assert_eq!(shared(replicas, workload).is_empty(), is_usual, "{workload} {replicas}");
        }
    }
    assert!(shared(8, "").is_empty());
    assert_eq!(shared(9, ""), ["G006"]);
    assert!(shared(20, "kernels").is_empty());
    let many = "mode = \"mps\"\nmps = { percentage = 5, memory = \"2G\" }";
    assert_eq!(numbers(many), ["G006"]);
    assert!(numbers(&format!("{many}\nworkload = \"kernels\"")).is_empty());
}

#[test]
fn hard_isolation_without_required_leases_is_g007() {
    assert_eq!(numbers("mode = \"mig\"\nlayout = [\"1g.10gb*7\"]\nisolation = \"hard\""), ["G007"]);
    assert_eq!(numbers("mode = \"exclusive\"\nisolation = \"hard\""), ["G007"]);
    assert!(numbers("mode = \"exclusive\"\nisolation = \"hard\"\nlease = \"required\"").is_empty());
    assert!(numbers("mode = \"exclusive\"").is_empty());
    assert!(numbers("mode = \"unmanaged\"\nisolation = \"hard\"").is_empty());
}

#[test]
fn memory_limits_above_the_memory_of_the_gpu_are_g008() {
    let gpus = preset::gpus("dgx-a100").unwrap();
    let found = |memory: &str| {
        let text =
            format!("[[gpu]]\nmatch = \"0\"\nmode = \"mps\"\nmps = {{ percentage = 25, memory = \"{memory}\" }}\n");
        lints_on_gpus(&Config::parse(&text, "config.toml").unwrap(), &gpus)
    };
    assert_eq!(found("20G"), []);
    let over = found("21G");
    assert_eq!(over.len(), 1);
    assert_eq!(over[0].lint, Lint::OvercommittedMemory);
    assert_eq!(over[0].hint, "write `memory = \"20480M\"` or less");
}

#[test]
fn finding_names_number_rule_and_remedy() {
    let text = "[[gpu]]\nname = \"desks\"\nmatch = \"0\"\nmode = \"timeslice\"\ntimeslice = { replicas = 4 }\n";
    let found = lints(&Config::parse(text, "config.toml").unwrap());
    assert_eq!(
        found[0].to_string(),
        "G005: rule `desks`: each of 4 lease holders can allocate all memory of the GPU; write mode = \"mps\" with \
         `memory`, or isolation = \"shared\" if the programs divide the memory"
    );
}

proptest! {
    /// `isolation = "shared"` states that the users accept shared faults and memory, so only the ratio, and limits that
    /// do not apply, remain mistakes.
    #[test]
    fn shared_isolation_leaves_only_ratio_and_soft_limits(
        replicas in 1u32..40, percentage in 1u32..=100, many: bool, mode in 0usize..3, optional: bool,
    ) {
        let mode = match mode {
            0 => format!("mode = \"timeslice\"\ntimeslice = {{ replicas = {replicas} }}"),
            1 => format!(
                "mode = \"mps\"\nmps = {{ percentage = {percentage}, users = \"{}\" }}",
                if many { "many" } else { "one" }
            ),
            _ => "mode = \"mig\"\nlayout = [\"1g.10gb*7:mps\"]".to_owned(),
        };
        let lease = if optional { "lease = \"optional\"" } else { "lease = \"required\"" };
        for number in numbers(&format!("{mode}\n{lease}\nisolation = \"shared\"")) {
            prop_assert!(["G004", "G006"].contains(&number), "{number}");
        }
    }

    /// With hard isolation, only MIG devices and whole GPUs are without a finding.
    #[test]
    fn hard_isolation_of_shared_gpus_is_always_reported(replicas in 2u32..40, percentage in 1u32..=100) {
        let timesliced =
            format!("mode = \"timeslice\"\ntimeslice = {{ replicas = {replicas} }}\nisolation = \"hard\"");
        prop_assert!(numbers(&timesliced).contains(&"G001"));
        let through_mps = format!("mode = \"mps\"\nmps = {{ percentage = {percentage} }}\nisolation = \"hard\"");
        prop_assert!(numbers(&through_mps).contains(&"G002"));
    }
}
