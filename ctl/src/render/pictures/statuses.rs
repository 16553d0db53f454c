//! Drawings of `gpushctl status`.

use gpush_core::{
    devices::CallerQuota,
    lease::quota::{Effective, Limits},
};

use super::*;

#[test]
fn status_of_a_mixed_host() {
    let shown = fixtures::status(fixtures::mixed(), false);
    assert_snapshot!("status-80", drawn(&shown, false, &fixtures::look(80, UTF8)));
    assert_snapshot!("status-120", drawn(&shown, false, &fixtures::look(120, UTF8)));
    assert_snapshot!("status-ascii", drawn(&shown, false, &fixtures::look(80, Charset::Ascii)));
    assert_snapshot!("status-brief", drawn(&shown, true, &fixtures::look(80, UTF8)));
    // Even on a wide terminal, the numbers of the GPUs must be right above their drawing.
    let wide = drawn(&shown, false, &fixtures::look(200, UTF8));
    let edge = |part: &str| wide.lines().filter(|line| line.contains(part)).map(appearance::width).max().unwrap();
    assert_eq!((edge("/80.0 GiB"), edge("in use"), edge("╮")), (99, 99, 99));
}

/// Fault: with 60 columns, headings, lines of MPS daemons and notes of the summary were wider than the terminal.
#[test]
fn every_status_fits_60_columns() {
    let mut shown = fixtures::status(fixtures::mixed(), false);
    shown.mps = fixtures::mps::all();
    shown.devices = gpush_core::devices::list(&shown.gpus, &shown.mps, &[]);
    for charset in [UTF8, Charset::Ascii] {
        let look = fixtures::look(60, charset);
        let brief = drawn(&shown, true, &look);
        let full = drawn(&shown, false, &look);
        assert!(full.contains("1g+"), "a profile with an attribute has a name:\n{full}");
        let summary = fits(&summary::summary(&shown, &look), &look);
        assert_snapshot!(format!("status-60-{charset:?}"), format!("{brief}---\n{full}---\n{summary}"));
    }
}

/// All drawings of a host must show the same use of a MIG device as `mig list`.
#[test]
fn device_that_a_queued_operation_needs_is_reserved_in_every_drawing() {
    let gpus: Vec<gpush_api::Gpu> = fixtures::mixed().into_iter().take(1).collect();
    let mut shown = fixtures::status(gpus.clone(), false);
    let needs = |device: &gpush_api::MigDevice| (device.instance == "2g.20gb@4").then(|| "operation op-7".to_owned());
    let (host, takers, slurm) = Default::default();
    let effective = Effective::without_quota(Limits::default());
    let quota = Some(CallerQuota { effective: &effective, held: &[], gpus: &shown.gpus });
    let offers = gpush_core::devices::Offers { host: &host, takers: &takers, slurm: &slurm, closed: &slurm, quota };
    gpush_core::devices::apply_queue(&mut shown.devices, needs, offers);
    let look = fixtures::look(100, UTF8);
    let mut text = drawn(&shown, false, &look);
    text += &format!("---\n{}", drawn(&shown, true, &look));
    text += &format!("---\n{}", fits(&summary::summary(&shown, &look), &look));
    let gpu = &shown.gpus[0];
    let devices = show::gpu(gpu, &shown.devices, &[], &[], &look);
    text += &format!("---\n{}", fixtures::plain(devices.split_once("MIG devices").unwrap().1));
    assert_snapshot!("status-reserved", text);
}

#[test]
fn status_with_sensors_shows_a_dash_for_what_is_not_reported() {
    let mut gpus = fixtures::mixed();
    gpus[5].sensors = gpush_api::Sensors {
        utilization_percent: Some(97),
        memory_utilization_percent: Some(41),
        temperature_c: Some(61),
        power_mw: Some(68_200),
        power_limit_mw: Some(72_000),
        ecc_corrected: Some(3),
        ecc_uncorrected: Some(0),
    };
    let shown = fixtures::status(gpus, false);
    for width in [60, 80, 120] {
        let look = fixtures::look(width, UTF8);
        let text = fixtures::plain(&status::status_with_sensors(&shown, true, &look));
        assert_snapshot!(format!("status-sensors-{width}"), text);
    }
}

#[test]
fn status_in_ascii_is_ascii() {
    let mut gpus = fixtures::mixed();
    gpus[5].processes[0].user = Some("Jürgen".into());
    let text = drawn(&fixtures::status(gpus, true), false, &fixtures::look(80, Charset::Ascii));
    assert!(text.is_ascii(), "{text}");
    assert!(text.contains("J?rgen"), "{text}");
}

#[test]
fn status_in_colour() {
    let look = fixtures::look(80, UTF8);
    let text = status::status(&fixtures::status(fixtures::mixed(), true), false, &look);
    // Replace escape characters, so that a difference in the snapshot is readable.
    assert_snapshot!("status-colour", text.replace('\x1b', "^["));
}

/// GPUs that differ only in index, address and UUIDs are drawn once, even if other GPUs are between them.
#[test]
fn status_of_many_gpus_groups_those_that_are_alike() {
    let idle = |index: u32| {
        let mut one = fixtures::gpu(index, "NVIDIA L4", 23_034, None);
        one.memory.used_mib = 512;
        one
    };
    let mut gpus: Vec<Gpu> = (0..64).map(idle).collect();
    let look = fixtures::look(80, UTF8);
    let text = drawn(&fixtures::status(gpus.clone(), false), false, &look);
    assert!(text.lines().count() <= 6 && text.contains("GPUs 0-63"), "{text}");
    gpus[9].processes = vec![fixtures::process(4123, "alice", "train", 12)];
    gpus[20].memory.used_mib = 9_000;
    gpus[30].state = GpuState::Cordoned;
    gpus[40].rule = Some("inference".into());
    let instances = |from: u32| {
        let of = |n: u8| fixtures::instance(from + u32::from(n), "3g.40gb", 4 * n, 4, (12, 40_448), &[]);
        Some(fixtures::mig(8, (0..2).map(of).collect()))
    };
    let mut cut: Vec<Gpu> = (64..66).map(|index| fixtures::gpu(index, "NVIDIA A100", 81_920, instances(1))).collect();
    cut[1].mig.as_mut().unwrap().instances[0].compute[0].uuid = Some("MIG-other".into());
    gpus.extend(cut);
    // The instances of this GPU have other ids than those of the other GPUs.
    gpus.push(fixtures::gpu(66, "NVIDIA A100", 81_920, instances(7)));
    assert_snapshot!("status-many-120", drawn(&fixtures::status(gpus, false), false, &fixtures::look(120, UTF8)));
    let mut odd: Vec<Gpu> = (0..64).map(idle).collect();
    odd.iter_mut().step_by(2).for_each(|gpu| gpu.rule = Some("odd".into()));
    let text = drawn(&fixtures::status(odd, false), false, &look);
    assert!(text.lines().count() <= 14 && text.contains("62\n") && text.contains("63\n"), "{text}");
}

#[test]
fn status_of_eight_gpus_cut_into_seven() {
    let shown = fixtures::status(fixtures::full(), true);
    assert_snapshot!("status-full-80", drawn(&shown, false, &fixtures::look(80, UTF8)));
    assert_snapshot!("status-full-brief-120", drawn(&shown, true, &fixtures::look(120, UTF8)));
}

#[test]
fn brief_status_has_one_line_for_each_gpu() {
    let mut gpus = fixtures::full();
    // Different rules, so that no GPUs are drawn together.
    gpus.iter_mut().enumerate().for_each(|(at, gpu)| gpu.rule = Some(format!("rule-{at}")));
    let number = gpus.len();
    let text = drawn(&fixtures::status(gpus, false), true, &fixtures::look(120, UTF8));
    assert_eq!(text.lines().count(), number + 2, "{text}");
    assert!(text.contains("3/7 in use  11.8/140.4 GiB"), "{text}");
}

#[test]
fn status_fits_any_width() {
    let shown = fixtures::status(fixtures::mixed(), true);
    let mut tried = 0;
    for charset in [Charset::Utf8, Charset::Ascii] {
        for width in 72..=240 {
            drawn(&shown, false, &fixtures::look(width, charset));
            tried += 1;
        }
        // On a narrower terminal, lines may be too long, but gpushctl must not panic.
        for width in 1..72 {
            status::status(&shown, false, &fixtures::look(width, charset));
            tried += 1;
        }
    }
    println!("{tried} widths drawn");
    assert_eq!(tried, 480);
}

/// Returns the pids of all processes that the user may see, on the GPU and in its instances.
fn pids(gpus: &[gpush_api::Gpu]) -> Vec<String> {
    let compute = |i: &gpush_api::GpuInstance| i.compute.iter().flat_map(|c| c.processes.clone()).collect::<Vec<_>>();
    let instances = gpus.iter().flat_map(|g| &g.mig).flat_map(|mig| &mig.instances);
    let inside = instances.flat_map(|i| i.processes.iter().cloned().chain(compute(i)));
    let all = gpus.iter().flat_map(|g| g.processes.clone()).chain(inside);
    all.filter_map(|process| process.pid).map(|pid| pid.to_string()).collect()
}

#[test]
fn no_pid_is_cut_at_sixty_columns() {
    let gpus = fixtures::mixed();
    let text = fits(
        &status::status(&fixtures::status(gpus.clone(), false), false, &fixtures::look(60, UTF8)),
        &fixtures::look(72, UTF8),
    );
    assert_snapshot!("status-60", text);
    for gpu in &gpus {
        // If there are several processes, the drawing must contain at least the pid of the first one.
        let Some(pid) = pids(std::slice::from_ref(gpu)).first().cloned() else { continue };
        assert!(text.split([' ', ',', '\n']).any(|word| word == pid), "{pid} is not whole:\n{text}");
    }
}

#[test]
fn output_to_a_pipe_is_not_cut() {
    let mut gpus = fixtures::mixed();
    let command = format!("python train.py --data {}", "/srv/data/".repeat(20));
    gpus[5].processes = vec![fixtures::process(4711, "ada", &command, 100)];
    gpus[5].name = "NVIDIA of a name that is a good deal longer than any that there is".into();
    let pipe = Appearance { wraps: false, ..fixtures::look(60, UTF8) };
    let shown = [
        status::status(&fixtures::status(gpus.clone(), false), false, &pipe),
        gpus.iter().map(|gpu| show::gpu(gpu, &fixtures::devices(&gpus), &[], &[], &pipe)).collect(),
        gpu_list::gpus(&gpus, &pipe).text().to_owned(),
    ];
    for (at, text) in shown.iter().enumerate() {
        assert!(!text.contains('…'), "{text}");
        assert!(at == 2 || text.contains(&command), "{text}");
        assert!(at == 0 || gpus.iter().all(|gpu| text.contains(gpu.uuid.as_str())), "{text}");
    }
}

#[test]
fn old_reading_shows_its_age() {
    let look = fixtures::look(80, UTF8);
    let mut one = fixtures::mixed().remove(0);
    one.stale = true;
    let printed = |age: i64, one: &mut gpush_api::Gpu| {
        one.observed_at = jiff::Timestamp::from_second(look.now.as_second() - age).unwrap();
        gpu_notes::of(one, &look).join("\n").contains("last read")
    };
    assert_eq!([0, 1, 2, 3, 60].map(|age| printed(age, &mut one)), [false, false, false, true, true]);
    one.stale = false;
    assert!(!printed(60, &mut one), "no newer reading was requested");
}

#[test]
fn status_of_an_agent_without_a_driver() {
    let mut shown = fixtures::status(Vec::new(), false);
    shown.version.driver = None;
    shown.health.status = gpush_api::HealthStatus::Degraded;
    shown.health.errors = vec![
        ApiError::new(Code::DriverUnavailable, "the NVIDIA driver is not loaded")
            .cause("NVML: driver not loaded")
            .hint("modprobe nvidia, or reboot after an update of the driver; gpushd tries again by itself"),
    ];
    assert_snapshot!("status-no-driver", drawn(&shown, false, &fixtures::look(80, UTF8)));
}

#[test]
fn odd_readings_do_not_break_the_drawing() {
    let mut gpus = fixtures::mixed();
    let mig = gpus[0].mig.as_mut().unwrap();
    // Add instances that a driver should not report: some overlap, exceed the slices, have no slices, or have an
    // unknown profile.
    mig.instances.push(fixtures::instance(20, "profile 99", 5, 4, (0, 0), &[]));
    mig.instances.push(fixtures::instance(21, "2g.20gb", 7, 2, (0, 0), &[]));
    mig.instances.push(fixtures::instance(22, "\u{1b}[31m", 7, 1, (9, 1), &[]));
    mig.instances.push(fixtures::instance(23, "x", 255, 255, (0, 0), &[]));
    gpus.truncate(1);
    assert_snapshot!("status-odd", drawn(&fixtures::status(gpus, false), false, &fixtures::look(80, UTF8)));
}

/// If a reading is from before the loss of a GPU, or was made during a change, the drawing must say so. This also
/// applies to a recent reading.
#[test]
fn drawing_of_an_old_reading_says_so() {
    let look = fixtures::look(100, UTF8);
    let mut one = fixtures::mixed().remove(0);
    one.observed_at = look.now;
    let devices =
        |gpu: &Gpu| fixtures::plain(&status::status(&fixtures::status(vec![gpu.clone()], false), false, &look));
    assert!(devices(&one).contains("MIG devices"));
    for (state, says) in [
        (GpuState::Lost, "last read 0s ago; the present instances are not known"),
        (GpuState::Changing, "last read 0s ago, while the change was running"),
    ] {
        one.state = state;
        one.stale = false;
        assert!(!devices(&one).contains("last read"), "a fresh reading has no note");
        one.stale = true;
        let text = devices(&one);
        assert!(text.contains(says), "{text}");
        assert_eq!(text.contains("MIG devices"), state != GpuState::Lost, "{text}");
        let shown = fixtures::plain(&show::gpu(&one, &fixtures::devices(std::slice::from_ref(&one)), &[], &[], &look));
        assert!(shown.contains("last read") && shown.contains("may have changed since"), "{shown}");
    }
}
