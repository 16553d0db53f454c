//! Compares what the driver layer reads from this host's GPUs with the output of nvidia-smi, and
//! records each GPU as a fixture. The program does not change the GPUs. `tests/gpu/run` runs this
//! program.
//!
//! `gpu_check OUT [--library PATH] [--simulated]` writes to OUT: `readings.json`,
//! `fixtures/<model>-<driver>.json`, and the original output of nvidia-smi. With `--simulated`, it
//! accepts a simulated driver, for the test of this program.

use gpush_api::GpuIndex;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Instant,
};

use gpush_nvml::{
    Hardware, Options, Reading,
    driver::{Driver, ProfileCache},
};
use gpush_tests::{fixture::Fixture, smi};

/// Number of comparisons, by result.
#[derive(Default)]
struct Tally {
    same: u32,
    differ: u32,
    impossible: u32,
}

impl Tally {
    fn compare<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, ours: &T, theirs: &T) {
        if ours == theirs {
            self.same += 1;
        } else {
            self.differ += 1;
            println!("DIFFERS  {what}: gpush {ours:?}, nvidia-smi {theirs:?}");
        }
    }

    fn impossible(&mut self, what: &str, why: &str) {
        self.impossible += 1;
        println!("NOT DONE {what}: {}", why.trim());
    }
}

struct Arguments {
    out: PathBuf,
    library: Option<PathBuf>,
    simulated: bool,
}

fn arguments() -> Option<Arguments> {
    let mut words = std::env::args_os().skip(1);
    let mut arguments = Arguments { out: words.next()?.into(), library: None, simulated: false };
    while let Some(word) = words.next() {
        match word.to_str()? {
            "--library" => arguments.library = Some(words.next()?.into()),
            "--simulated" => arguments.simulated = true,
            _ => return None,
        }
    }
    Some(arguments)
}

fn main() -> ExitCode {
    let Some(arguments) = arguments() else {
        eprintln!("usage: gpu_check OUT [--library PATH] [--simulated]");
        return ExitCode::from(2);
    };
    match check(&arguments) {
        Ok(tally) => {
            println!("{} the same, {} differ, {} could not be compared", tally.same, tally.differ, tally.impossible);
            println!("results are in {}", arguments.out.display());
            if tally.differ == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(Stop::Skipped(why)) => {
            println!("SKIPPED readings: {why}");
            ExitCode::SUCCESS
        }
        Err(Stop::Failed(why)) => {
            eprintln!("gpu_check: {why}");
            ExitCode::FAILURE
        }
    }
}

enum Stop {
    Skipped(String),
    Failed(String),
}

impl<E: std::fmt::Display> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.to_string())
    }
}

fn check(arguments: &Arguments) -> Result<Tally, Stop> {
    let driver = match Driver::load(arguments.library.as_deref()) {
        Ok(driver) => driver,
        Err(error) if error.is_driver_unavailable() => return Err(Stop::Skipped(format!("no driver: {error}"))),
        Err(error) => return Err(error.into()),
    };
    if driver.is_simulated() && !arguments.simulated {
        return Err(Stop::Skipped("the driver found is gpush's simulator; leave its environment first".to_owned()));
    }
    let info = driver.info()?;
    println!("driver {}, NVML {}, CUDA {}, {}", info.version, info.nvml, info.cuda, info.library);
    let fixtures = arguments.out.join("fixtures");
    fs::create_dir_all(&fixtures)?;
    let mut tally = Tally::default();
    let mut readings = Vec::new();
    for index in 0..driver.count()? {
        let mut cache = ProfileCache::default();
        let began = Instant::now();
        match driver.gpu_by_index(GpuIndex(index)).and_then(|gpu| gpu.read(&mut cache)) {
            Ok(reading) => {
                println!("GPU {index}: {} read in {:?}", reading.identity.name, began.elapsed());
                for warning in &reading.warnings {
                    println!("  warning: {warning}");
                }
                let fixture = Fixture::of(&info, &reading, &cache.reported_profiles());
                let text = serde_json::to_string_pretty(&fixture)?;
                fs::write(fixtures.join(fixture.file_name()), text + "\n")?;
                readings.push(reading);
            }
            Err(error) => tally.impossible(&format!("GPU {index}"), &error.to_string()),
        }
    }
    fs::write(arguments.out.join("readings.json"), serde_json::to_string_pretty(&readings)? + "\n")?;
    if let Err(why) = through_worker(arguments, &readings, &mut tally) {
        tally.differ += 1;
        println!("DIFFERS  through the worker: {why}");
    }
    against_smi(&arguments.out, &info, &readings, &mut tally)?;
    Ok(tally)
}

/// Compares the readings with readings through a worker process. gpushd also reads through a worker
/// process.
fn through_worker(arguments: &Arguments, readings: &[Reading], tally: &mut Tally) -> Result<(), String> {
    let here = std::env::current_exe().map_err(|e| e.to_string())?;
    let worker = here.with_file_name("driver_worker");
    if !worker.exists() {
        tally.impossible("the driver worker", "driver_worker is not in the directory of this program");
        return Ok(());
    }
    let mut options = Options::new(worker);
    options.library.clone_from(&arguments.library);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
    runtime.block_on(async {
        let hardware = Hardware::start(options);
        for direct in readings {
            let uuid = &direct.identity.uuid;
            let reading = hardware.read(uuid).await.map_err(|e| e.to_string())?;
            let still = |r: &Reading| (r.identity.clone(), r.memory.total_mib, r.mig.clone().map(|m| m.profiles));
            tally.compare(&format!("{uuid} through the worker"), &still(&reading), &still(direct));
        }
        hardware.stop().await.map_err(|e| e.to_string())
    })
}

/// Runs nvidia-smi and stores its output in a file. Returns the output. If nvidia-smi has no
/// output, returns the reason as an error.
fn nvidia_smi(out: &Path, file: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("nvidia-smi").args(arguments).output().map_err(|e| format!("nvidia-smi: {e}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    fs::write(out.join(file), &text).map_err(|e| e.to_string())?;
    if output.status.success() {
        return Ok(text);
    }
    let why = if text.trim().is_empty() { String::from_utf8_lossy(&output.stderr).into_owned() } else { text };
    Err(format!("nvidia-smi {}: {}", arguments.join(" "), why.lines().next().unwrap_or("no output")))
}

fn against_smi(out: &Path, info: &gpush_api::Driver, readings: &[Reading], tally: &mut Tally) -> Result<(), Stop> {
    let query = format!("--query-gpu={}", smi::QUERY);
    match nvidia_smi(out, "query-gpu.csv", &[&query, "--format=csv,noheader,nounits"]) {
        Ok(text) => identities(&smi::gpus(&text)?, info, readings, tally),
        Err(why) => tally.impossible("identities", &why),
    }
    match nvidia_smi(out, "mig-lgip.txt", &["mig", "-lgip"]) {
        Ok(text) => profiles(&smi::profiles(&text), readings, tally),
        Err(why) => tally.impossible("profiles", &why),
    }
    match nvidia_smi(out, "mig-lgipp.txt", &["mig", "-lgipp"]) {
        Ok(text) => placements(&smi::placements(&text), readings, tally),
        Err(why) => tally.impossible("placements", &why),
    }
    match nvidia_smi(out, "mig-lgi.txt", &["mig", "-lgi"]) {
        Ok(text) => instances(&smi::gpu_instances(&text), readings, tally),
        Err(why) => tally.impossible("GPU instances", &why),
    }
    match nvidia_smi(out, "list.txt", &["-L"]) {
        Ok(text) => devices(&smi::mig_uuids(&text), readings, tally),
        Err(why) => tally.impossible("MIG devices", &why),
    }
    Ok(())
}

fn identities(gpus: &[smi::Gpu], info: &gpush_api::Driver, readings: &[Reading], tally: &mut Tally) {
    tally.compare("number of GPUs", &readings.len(), &gpus.len());
    for gpu in gpus {
        let Some(reading) = readings.iter().find(|r| r.identity.uuid == gpu.uuid.as_str()) else {
            tally.impossible(&gpu.uuid, "it could not be read");
            continue;
        };
        let about = |what: &str| format!("GPU {} {what}", gpu.index);
        tally.compare(&about("index"), &reading.identity.index.0, &gpu.index);
        tally.compare(&about("PCI address"), &reading.identity.pci, &gpu.pci);
        tally.compare(&about("name"), &reading.identity.name, &gpu.name);
        tally.compare(&about("memory"), &reading.memory.total_mib, &gpu.memory_mib);
        tally.compare(&about("MIG mode"), &reading.mig.as_ref().map(|m| m.enabled), &gpu.mig);
        tally.compare(
            &about("pending MIG mode"),
            &reading.mig.as_ref().map(gpush_api::Mig::pending_mode),
            &gpu.pending,
        );
        tally.compare(&about("driver"), &info.version, &gpu.driver);
    }
}

fn profiles(theirs: &BTreeMap<u32, Vec<smi::Profile>>, readings: &[Reading], tally: &mut Tally) {
    for reading in readings {
        let index = reading.identity.index;
        let Some(mig) = &reading.mig else { continue };
        let theirs = theirs.get(&index.0).map(Vec::as_slice).unwrap_or_default();
        tally.compare(&format!("GPU {index} number of profiles"), &mig.profiles.len(), &theirs.len());
        for profile in theirs {
            let ours = mig.profiles.iter().find(|p| p.id == profile.id).map(|p| {
                let e = p.engines;
                smi::Profile {
                    name: p.name.clone(),
                    id: p.id,
                    max: p.max,
                    memory_centi_gib: printed(p.memory_mib, profile.memory_centi_gib),
                    sm: p.sm,
                    engines: [e.decoder, e.encoder, e.copy, e.jpeg, e.ofa],
                }
            });
            tally.compare(&format!("GPU {index} profile {}", profile.name), &ours, &Some(profile.clone()));
        }
    }
}

/// Returns MiB as hundredths of a GiB. If the result differs from `theirs` only by rounding,
/// returns `theirs`.
fn printed(mib: u64, theirs: u64) -> u64 {
    let exact = mib * 100;
    if exact.abs_diff(theirs * 1024) < 1024 { theirs } else { exact / 1024 }
}

fn placements(theirs: &BTreeMap<(u32, u32), (Vec<u8>, u8)>, readings: &[Reading], tally: &mut Tally) {
    for ((gpu, id), (starts, size)) in theirs {
        let ours = readings.iter().find(|r| r.identity.index == *gpu).and_then(|r| r.mig.as_ref());
        let ours = ours.and_then(|mig| mig.profiles.iter().find(|p| p.id == *id));
        let ours = ours.map(|p| p.placements.iter().map(|p| (p.start, p.size)).collect::<Vec<_>>());
        let theirs = starts.iter().map(|start| (*start, *size)).collect::<Vec<_>>();
        tally.compare(&format!("GPU {gpu} placements of profile {id}"), &ours, &Some(theirs));
    }
}

fn instances(theirs: &[(u32, String, u32, u32, u8, u8)], readings: &[Reading], tally: &mut Tally) {
    let mut ours: Vec<_> = readings
        .iter()
        .flat_map(|r| {
            let instances = r.mig.iter().flat_map(|mig| &mig.instances);
            instances.map(|gi| {
                let at = gi.placement;
                (r.identity.index.0, gi.profile.clone(), gi.profile_id, gi.id, at.start, at.size)
            })
        })
        .collect();
    let mut theirs = theirs.to_vec();
    ours.sort();
    theirs.sort();
    tally.compare("GPU instances", &ours, &theirs);
}

fn devices(theirs: &[String], readings: &[Reading], tally: &mut Tally) {
    let mut ours: Vec<_> = readings
        .iter()
        .flat_map(|r| r.mig.iter().flat_map(|mig| &mig.instances))
        .flat_map(|gi| gi.compute.iter().filter_map(|ci| ci.uuid.as_ref().map(ToString::to_string)))
        .collect();
    ours.sort();
    tally.compare("MIG devices", &ours, &theirs.to_vec());
}
