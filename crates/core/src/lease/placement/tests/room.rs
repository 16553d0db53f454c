//! `pack` keeps room for later requests.

use super::*;

/// Returns a host with GPUs of the model that have these instances.
fn host(model: &str, dynamic: bool, gpus: &[&str]) -> Host {
    Host { gpus: gpus.iter().enumerate().map(|(index, text)| mig(index as u32, model, dynamic, text)).collect() }
}

/// Grants requests for one profile each. Returns the GPU of each lease.
fn grant(host: &mut Host, profiles: &[&str]) -> Vec<u32> {
    let mut gpus = Vec::new();
    for name in profiles {
        let assignment = place(host, &wanted(profile(name), 1), PlacementPolicy::Pack).unwrap();
        gpus.push(assignment.members[0].gpu().0);
        host.occupy(&assignment, 1000);
    }
    gpus
}

/// Fault: the second lease opened the empty GPU, and a request for a whole GPU was refused.
#[test]
fn small_lease_fills_a_divided_gpu() {
    for (model, small, half, whole) in
        [("a100-80", "1g.10gb", "3g.40gb", "7g.80gb"), ("h200-141", "1g.18gb", "3g.71gb", "7g.141gb")]
    {
        for order in [[half, small], [small, half]] {
            let mut host = host(model, true, &["", ""]);
            assert_eq!(grant(&mut host, &order), [0, 0], "{order:?}");
            assert_eq!(grant(&mut host, &[whole]), [1], "{order:?}");
        }
    }
}

#[test]
fn seven_small_leases_use_one_gpu() {
    let mut host = host("a100-80", true, &["", "", ""]);
    assert_eq!(grant(&mut host, &["1g.10gb"; 14]), [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]);
}

#[test]
fn free_instance_on_an_empty_gpu_is_not_preferred_to_a_divided_gpu() {
    let host = host("a100-80", true, &["1g.10gb@6", "3g.40gb@4 used"]);
    let assignment = place(&host, &wanted(profile("1g.10gb"), 1), PlacementPolicy::Pack).unwrap();
    assert_eq!(assignment.gpus().into_iter().collect::<Vec<_>>(), [GpuIndex(1)]);
}

/// Fault: leases were spread over GPUs with fixed instances.
#[test]
fn fixed_devices_are_used_one_gpu_after_the_other() {
    let sevenths: Vec<String> = (0..7).map(|start| format!("1g.10gb@{start}")).collect();
    let sevenths = sevenths.join(", ");
    let mut host = host("a100-80", false, &[&sevenths, &sevenths, &sevenths]);
    assert_eq!(grant(&mut host, &["1g.10gb"; 9]), [0, 0, 0, 0, 0, 0, 0, 1, 1]);
}

/// A lease on a fixed device takes nothing from requests for larger devices.
#[test]
fn fixed_devices_are_used_before_a_dynamic_gpu_is_divided() {
    let mut host = Host { gpus: vec![mig(0, "a100-80", true, ""), mig(1, "a100-80", false, "1g.10gb@0, 1g.10gb@1")] };
    assert_eq!(grant(&mut host, &["1g.10gb"; 3]), [1, 1, 0]);
}
