//! Drawings of GPUs, their profiles and MIG devices.

use super::*;
use gpush_api::GpuIndex;

#[test]
fn gpus_as_a_table() {
    let gpus = fixtures::mixed();
    for width in [60, 80, 120, 140] {
        let look = fixtures::look(width, UTF8);
        assert_snapshot!(format!("gpu-list-{width}"), fits(gpu_list::gpus(&gpus, &look).text(), &look));
    }
    // With `-o wide`, all columns are shown, even if they do not fit.
    let wide = Appearance { wraps: false, wide: true, ..fixtures::look(60, UTF8) };
    assert_snapshot!("gpu-list-wide", fixtures::plain(gpu_list::gpus(&gpus, &wide).text()));
}

/// Fault: on a terminal of 108 columns, the list shortened UUIDs, although there was room for them.
#[test]
fn list_of_gpus_shortens_uuids_only_if_there_is_no_room() {
    let gpus = fixtures::full();
    for width in 60..140 {
        let look = fixtures::look(width, UTF8);
        let text = fits(gpu_list::gpus(&gpus, &look).text(), &look);
        let (has_whole, has_short) = (text.contains(gpus[0].uuid.as_str()), text.contains("GPU-00000000…"));
        assert_eq!((has_whole, has_short), (width >= 86, width < 86), "{width}:\n{text}");
    }
}

#[test]
fn gpu_with_all_details() {
    let look = fixtures::look(80, UTF8);
    let mut gpus = fixtures::mixed();
    gpus[0].layout = Some(vec!["3g.40gb".into(), "2g.20gb".into(), "1g.10gb".into()]);
    gpus[0].mig.as_mut().unwrap().profiles = profiles_of("dgx-a100");
    // gpushctl does not shorten MIG UUIDs here, so this drawing may be wider than the terminal.
    assert_snapshot!(
        "gpu-show-busy",
        fixtures::plain(&show::gpu(&gpus[0], &fixtures::devices(&gpus), &[], &[], &look))
    );
    assert_snapshot!(
        "gpu-show-split",
        fixtures::plain(&show::gpu(&gpus[1], &fixtures::devices(&gpus), &[], &[], &look))
    );
    let named = |rule: &str| {
        let one = gpush_api::Gpu { rule: Some(rule.into()), ..gpus[1].clone() };
        fixtures::plain(&show::gpu(&one, &fixtures::devices(std::slice::from_ref(&one)), &[], &[], &look))
    };
    assert!(named("rule 1").contains(", by rule 1\n") && named("a").contains(", by rule a\n"));
    assert_snapshot!("gpu-show-l4", fits(&show::gpu(&gpus[5], &fixtures::devices(&gpus), &[], &[], &look), &look));
    gpus[5].compute_mode = Some(gpush_api::ComputeMode::Default);
    assert!(
        !show::gpu(&gpus[5], &fixtures::devices(&gpus), &[], &[], &look).contains("compute mode"),
        "as everybody expects it"
    );
    gpus[5].compute_mode = Some(gpush_api::ComputeMode::ExclusiveProcess);
    assert_snapshot!(
        "gpu-show-exclusive",
        fits(&show::gpu(&gpus[5], &fixtures::devices(&gpus), &[], &[], &look), &look)
    );
}

fn profiles_of(preset: &str) -> Arc<Vec<gpush_api::GpuProfile>> {
    gpush_core::preset::gpus(preset).unwrap()[0].mig.clone().unwrap().profiles
}

#[test]
fn profiles_as_tables() {
    let look = fixtures::look(80, UTF8);
    let mut gpus = gpush_core::preset::gpus("mixed").unwrap();
    let mut twin = gpus[0].clone();
    twin.index = GpuIndex(6);
    for (gpu, left) in [(&mut gpus[0], 3), (&mut twin, 7)] {
        Arc::make_mut(&mut gpu.mig.as_mut().unwrap().profiles)[0].remaining = Some(left);
    }
    gpus.push(twin);
    let off = gpus[2].mig.as_mut().unwrap();
    off.set_mode(false, false);
    assert_snapshot!("mig-profiles", fits(profiles::profiles(&gpus, &look).text(), &look));
    let narrow = fixtures::look(60, UTF8);
    assert_snapshot!("mig-profiles-60", fits(profiles::profiles(&gpus, &narrow).text(), &narrow));
}

#[test]
fn profile_names_never_wrap_and_pipes_get_one_line_per_row() {
    let gpus = gpush_core::preset::gpus("rtx-pro-6000x2").unwrap();
    let names: Vec<_> = gpus[0].mig.iter().flat_map(|mig| mig.profiles.iter()).map(|p| p.name.clone()).collect();
    let mut tried = 0;
    for (width, wraps) in [(60, true), (72, true), (80, true), (60, false), (80, false)] {
        let look = Appearance { wraps, ..fixtures::look(width, UTF8) };
        let text = fixtures::plain(profiles::profiles(&gpus, &look).text());
        for name in &names {
            let whole = |line: &str| line.split_whitespace().next() == Some(name);
            assert!(text.lines().any(whole), "{name} at {width}:\n{text}");
            tried += 1;
        }
        if !wraps {
            assert_eq!(
                text.lines().count(),
                names.len() + 2,
                "one heading for each GPU, then one line for each profile:\n{text}"
            );
        }
    }
    println!("{tried} names looked for");
}

#[test]
fn time_sliced_gpu_shows_the_limits_of_time_slicing() {
    let look = fixtures::look(80, UTF8);
    let turns = |state, level, reason: Option<&str>| gpush_api::TimesliceView {
        replicas: 4,
        wanted: gpush_api::TimesliceLevel::Long,
        state,
        level,
        reason: reason.map(Into::into),
        since: Some(jiff::Timestamp::from_second(fixtures::READ_AT - 3600).unwrap()),
        read_at: Some(jiff::Timestamp::from_second(fixtures::READ_AT - 40).unwrap()),
    };
    let known = gpush_api::TimesliceState::Known;
    let mut gpu = fixtures::gpu(0, "NVIDIA L4", 23_034, None);
    gpu.mode = gpush_api::Mode::Timeslice;
    let of = |view, drift: &[&str]| gpush_api::Gpu {
        timeslice: Some(view),
        drift: drift.iter().map(|one| (*one).to_owned()).collect(),
        ..gpu.clone()
    };
    let gpus = vec![
        of(turns(known, Some(gpush_api::TimesliceLevel::Long), None), &[]),
        of(
            turns(
                known,
                Some(gpush_api::TimesliceLevel::Default),
                Some("nvidia-smi cannot set the time-slice level `long`: Unknown Error"),
            ),
            &["the time-slice level is `default`, but the config says `long`"],
        ),
        of(turns(gpush_api::TimesliceState::Unsupported, None, Some("Turing and later have them")), &[]),
        of(turns(gpush_api::TimesliceState::Unknown, None, Some("`nvidia-smi compute-policy` fails")), &[]),
    ];
    let shown: Vec<String> =
        gpus.iter().map(|gpu| fits(&show::gpu(gpu, &fixtures::devices(&gpus), &[], &[], &look), &look)).collect();
    assert_snapshot!("gpu-show-turns", shown.join("\n"));
    assert_snapshot!("status-turns", fits(&status::status(&fixtures::status(gpus, false), false, &look), &look));
}
