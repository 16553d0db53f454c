//! Layouts on simulated hardware, and the presets that describe simulated hosts.

use gpush_api::OperationState;
use gpush_tests::{
    agent::{Agent, real_layout},
    host::{Host, program},
};

/// Applies layouts to a GPU one after the other. Compares each layout with the instances that then
/// exist.
fn walk(host: &Host, agent: &Agent, gpu: usize, layouts: &[(&[&str], &[&str])]) {
    for (entries, expected) in layouts {
        let operation = agent.apply(&[&gpu.to_string()], entries);
        assert_eq!(operation.state, OperationState::Done, "{operation:?}");
        assert_eq!(real_layout(host, gpu), *expected, "{entries:?}");
        let shown = agent.gpu(u32::try_from(gpu).expect("an index"));
        let shown: Vec<String> = shown
            .mig
            .expect("a GPU with MIG")
            .instances
            .iter()
            .map(|i| {
                let compute =
                    i.compute.iter().map(|c| format!("{}@{}", c.profile, c.placement.expect("a placement").start));
                format!("{}@{}[{}]", i.profile, i.placement.start, compute.collect::<Vec<_>>().join(" "))
            })
            .collect();
        assert_eq!(shown, *expected, "what the API shows after {entries:?}");
    }
    println!("GPU {gpu}: {} layouts", layouts.len());
}

#[test]
fn a100_gets_mixed_layouts_with_placements_and_cis() {
    let host = Host::up("dgx-a100");
    let agent = Agent::start(&host, "");
    walk(
        &host,
        &agent,
        0,
        &[
            (&["7g.80gb"], &["7g.80gb@0[7g.80gb@0]"]),
            (
                &["3g.40gb", "2g.20gb", "1g.10gb*2"],
                &["2g.20gb@0[2g.20gb@0]", "1g.10gb@2[1g.10gb@0]", "1g.10gb@3[1g.10gb@0]", "3g.40gb@4[3g.40gb@0]"],
            ),
            (&["1g.10gb@6", "3g.40gb@0"], &["3g.40gb@0[3g.40gb@0]", "1g.10gb@6[1g.10gb@0]"]),
            (&["1c.3g.40gb*3"], &["3g.40gb@0[1c.3g.40gb@0 1c.3g.40gb@1 1c.3g.40gb@2]"]),
            (&["none"], &[]),
            (&["none"], &[]),
        ],
    );
    for gpu in 1..8 {
        assert!(real_layout(&host, gpu).is_empty(), "GPU {gpu} was not asked for");
    }
}

/// A preset describes the same GPUs as the simulated host with the same name. `config check` uses
/// the preset offline.
#[test]
fn offline_preset_matches_simulated_host() {
    let mut compared = 0;
    for preset in gpush_geometry::PRESETS {
        let host = Host::up(preset.name);
        let agent = Agent::start(&host, "");
        let real = agent.gpus();
        let saved = host.scratch("config.toml");
        for gpu in &real {
            std::fs::write(
                &saved,
                format!(
                    "[[gpu]]\nmatch = [\"{}\"]\nmode = \"unmanaged\"\n[[gpu]]\nmatch = [\"{}\"]\nmode = \"unmanaged\"\n",
                    gpu.pci, gpu.name
                ),
            )
            .unwrap();
            let check = host
                .command(program("gpushctl"))
                .args(["config", "check", "--offline", preset.name])
                .arg(&saved)
                .output()
                .unwrap();
            let printed = String::from_utf8_lossy(&check.stdout).into_owned() + &String::from_utf8_lossy(&check.stderr);
            assert!(!printed.contains("no GPU of this host"), "{} {} {}: {printed}", preset.name, gpu.pci, gpu.name);
            compared += 1;
        }
    }
    println!("compared {compared} GPUs of {} presets", gpush_geometry::PRESETS.len());
}
