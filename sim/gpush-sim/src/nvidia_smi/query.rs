//! `nvidia-smi --query-gpu` and `--query-compute-apps`. They print values as CSV, which nvsmi and
//! scripts read.
//!
//! The fields are those of `nvidia-smi --help-query-gpu`. As in the real program, an unknown field
//! is an error with exit code 2.

use std::process::ExitCode;

use mps_sim::outln;
use silicon::machine::{Board, COMPUTE_MODES, Machine, Reading, Slot};
use silicon::{Host, HostError};

/// The fields of a query, and its format.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Query {
    about: About,
    fields: Vec<String>,
    header: bool,
    units: bool,
    ids: Option<Vec<String>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum About {
    Gpus,
    ComputeApps,
}

/// A value: a text, or a number with its unit. `Absent` means that the driver does not report a
/// value.
pub(super) enum Value {
    Text(String),
    Number(u64, &'static str),
    Absent,
}

impl Value {
    /// Formats the value, with its unit or without it; `None` if the driver does not report it.
    pub(super) fn text(&self, units: bool) -> Option<String> {
        match self {
            Value::Text(text) => Some(text.clone()),
            Value::Number(number, unit) if units => Some(format!("{number} {unit}")),
            Value::Number(number, _) => Some(number.to_string()),
            Value::Absent => None,
        }
    }
}

/// Parses the command line of a query; returns `None` for other commands.
pub(super) fn parse(arguments: &[String]) -> Option<Result<Query, String>> {
    let about = |argument: &str| match argument.split_once('=') {
        Some(("--query-gpu", fields)) => Some((About::Gpus, fields.to_owned())),
        Some(("--query-compute-apps", fields)) => Some((About::ComputeApps, fields.to_owned())),
        Some(_) | None => None,
    };
    let (about, fields) = arguments.iter().find_map(|argument| about(argument))?;
    let mut query = Query { about, fields: split(&fields), header: true, units: true, ids: None };
    let mut csv = false;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let (name, value) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None if argument == "-i" || argument == "--id" => (argument.as_str(), rest.next().cloned()),
            None => (argument.as_str(), None),
        };
        match (name, value) {
            ("--query-gpu" | "--query-compute-apps", Some(_)) => {}
            ("--format", Some(format)) => {
                for word in split(&format) {
                    match word.as_str() {
                        "csv" => csv = true,
                        "noheader" => query.header = false,
                        "nounits" => query.units = false,
                        other => return Some(Err(format!("\"{other}\" is not a known format option."))),
                    }
                }
            }
            ("-i" | "--id", Some(ids)) => query.ids = Some(split(&ids)),
            _ => return Some(Err(format!("Invalid combination of input arguments: {argument}"))),
        }
    }
    if !csv {
        return Some(Err("\"--format=\" switch is missing. See 'nvidia-smi --help' for all valid options.".to_owned()));
    }
    Some(Ok(query))
}

fn split(text: &str) -> Vec<String> {
    text.split(',').map(|word| word.trim().to_owned()).collect()
}

/// Executes the query and prints the result.
pub(super) fn act(host: &Host, query: &Query) -> Result<ExitCode, HostError> {
    let gpus = match super::gpus(host, query.ids.clone()) {
        Ok(gpus) => gpus,
        Err(code) => return Ok(code),
    };
    let machine = host.read()?;
    let mut rows = Vec::new();
    for gpu in gpus {
        let made = match query.about {
            About::Gpus => gpu_row(host, &machine, gpu, &query.fields).map(|row| vec![row]),
            About::ComputeApps => app_rows(host, &machine, gpu, &query.fields),
        };
        match made {
            Ok(more) => rows.extend(more),
            Err(field) => {
                outln!("Field \"{field}\" is not a valid field to query.\n");
                return Ok(ExitCode::from(2));
            }
        }
    }
    if query.header {
        let units = |field: &String| match unit(field) {
            Some(unit) if query.units => format!("{field} [{unit}]"),
            Some(_) | None => field.clone(),
        };
        outln!("{}", query.fields.iter().map(units).collect::<Vec<_>>().join(", "));
    }
    for row in rows {
        let text = |value: &Value| value.text(query.units).unwrap_or_else(|| "[N/A]".to_owned());
        outln!("{}", row.iter().map(text).collect::<Vec<_>>().join(", "));
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the unit of a field, as the header prints it.
fn unit(field: &str) -> Option<&'static str> {
    match field {
        "memory.total" | "memory.used" | "memory.free" | "memory.reserved" | "used_memory" | "used_gpu_memory" => {
            Some("MiB")
        }
        "utilization.gpu" | "utilization.memory" => Some("%"),
        "power.draw" | "power.limit" | "enforced.power.limit" => Some("W"),
        "clocks.sm" | "clocks.current.sm" | "clocks.mem" | "clocks.current.memory" | "clocks.max.sm" => Some("MHz"),
        _ => None,
    }
}

/// Returns the requested values of a GPU. The error names an unknown field.
pub(super) fn gpu_row(host: &Host, machine: &Machine, gpu: u32, fields: &[String]) -> Result<Vec<Value>, String> {
    let slot = &host.hardware().slots[gpu as usize];
    let state = machine.gpus().get(gpu as usize);
    // A lost GPU has no readings.
    let reading = machine.reading(gpu).ok();
    fields.iter().map(|field| gpu_field(host, machine, slot, state, reading, field)).collect()
}

fn gpu_field(
    host: &Host,
    machine: &Machine,
    slot: &Slot,
    state: Option<&silicon::machine::Gpu>,
    reading: Option<Reading>,
    field: &str,
) -> Result<Value, String> {
    let identity = &slot.identity;
    let index = state.map_or(0, |gpu| gpu.index);
    let number = |value: Option<u64>, unit| value.map_or(Value::Absent, |value| Value::Number(value, unit));
    let memory = || machine.memory(index).ok();
    let on_off = |on: bool| Value::Text(if on { "Enabled" } else { "Disabled" }.to_owned());
    let mig = |of: fn(&silicon::machine::Gpu) -> bool| match state {
        Some(gpu) if slot.part.has_mig() => on_off(of(gpu)),
        Some(_) | None => Value::Absent,
    };
    // The driver does not report the load of a GPU in MIG mode.
    let load = reading.filter(|_| state.is_some_and(|gpu| !gpu.mig));
    let board = Board::of(&slot.part.model);
    Ok(match field {
        "index" => Value::Text(index.to_string()),
        "count" => Value::Text(host.hardware().slots.len().to_string()),
        "uuid" | "gpu_uuid" => Value::Text(identity.uuid.clone()),
        "name" | "gpu_name" => Value::Text(identity.name.clone()),
        "serial" | "gpu_serial" => Value::Text(identity.serial.clone()),
        "driver_version" => Value::Text(host.hardware().driver.to_string()),
        "pci.bus_id" | "gpu_bus_id" => Value::Text(format!("0000{}", identity.pci_address()).to_uppercase()),
        "pci.device_id" => Value::Text(format!("0x{:08X}", identity.pci_device_id)),
        "pci.sub_device_id" => Value::Text(format!("0x{:08X}", identity.pci_subsystem_id)),
        "compute_cap" => Value::Text(format!("{}.{}", board.compute_capability.0, board.compute_capability.1)),
        "display_active" => Value::Text("Disabled".to_owned()),
        "display_mode" => Value::Text("Enabled".to_owned()),
        "persistence_mode" => state.map_or(Value::Absent, |gpu| on_off(gpu.persistence)),
        "compute_mode" => {
            let mode = state.and_then(|gpu| COMPUTE_MODES.get(gpu.compute_mode as usize)).copied();
            mode.map_or(Value::Absent, |mode| Value::Text(compute_mode(mode)))
        }
        "mig.mode.current" => mig(|gpu| gpu.mig),
        "mig.mode.pending" => mig(|gpu| gpu.mig_pending),
        "pstate" => reading.map_or(Value::Absent, |now| Value::Text(format!("P{}", now.performance_state))),
        "memory.total" => number(memory().map(|of| of.total_mib), "MiB"),
        "memory.reserved" => number(memory().map(|of| of.reserved_mib), "MiB"),
        "memory.used" => number(memory().map(|of| of.used_mib), "MiB"),
        "memory.free" => number(memory().map(|of| of.total_mib.saturating_sub(of.used_mib + of.reserved_mib)), "MiB"),
        "utilization.gpu" => number(load.map(|now| now.gpu_percent.into()), "%"),
        "utilization.memory" => number(load.map(|now| now.memory_percent.into()), "%"),
        "temperature.gpu" => reading.map_or(Value::Absent, |now| Value::Text(now.temperature_c.to_string())),
        "power.draw" => number(reading.map(|now| u64::from(now.power_mw / 1000)), "W"),
        "power.limit" | "enforced.power.limit" => number(Some(u64::from(board.power_limit_mw / 1000)), "W"),
        "clocks.sm" | "clocks.current.sm" => number(reading.map(|now| now.sm_clock_mhz.into()), "MHz"),
        "clocks.mem" | "clocks.current.memory" => number(reading.map(|now| now.memory_clock_mhz.into()), "MHz"),
        "clocks.max.sm" => number(Some(board.max_sm_clock_mhz.into()), "MHz"),
        other => return Err(other.to_owned()),
    })
}

/// Formats a compute mode as nvidia-smi does: `Exclusive_Process`.
fn compute_mode(name: &str) -> String {
    let word = |word: &str| {
        let lower = word.to_lowercase();
        let mut letters = lower.chars();
        letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
    };
    name.split('_').map(word).collect::<Vec<_>>().join("_")
}

/// Returns the requested values of each compute process on a GPU. The error names an unknown field.
fn app_rows(host: &Host, machine: &Machine, gpu: u32, fields: &[String]) -> Result<Vec<Vec<Value>>, String> {
    let identity = &host.hardware().slots[gpu as usize].identity;
    let processes = machine.gpus().get(gpu as usize).map_or(&[][..], |gpu| gpu.processes.as_slice());
    let field = |process: &silicon::machine::Process, field: &String| {
        Ok(match field.as_str() {
            "pid" => Value::Text(process.pid.pid.to_string()),
            "process_name" | "name" => Value::Text(program_of(process.pid.pid)),
            "gpu_uuid" => Value::Text(identity.uuid.clone()),
            "gpu_name" => Value::Text(identity.name.clone()),
            "gpu_serial" => Value::Text(identity.serial.clone()),
            "gpu_bus_id" => Value::Text(format!("0000{}", identity.pci_address()).to_uppercase()),
            "used_memory" | "used_gpu_memory" => Value::Number(process.memory_mib, "MiB"),
            other => return Err(other.to_owned()),
        })
    };
    let computes = |process: &&silicon::machine::Process| match process.kind {
        silicon::machine::ProcessKind::Compute | silicon::machine::ProcessKind::Mps => true,
        silicon::machine::ProcessKind::Graphics | silicon::machine::ProcessKind::Handle => false,
    };
    processes.iter().filter(computes).map(|process| fields.iter().map(|name| field(process, name)).collect()).collect()
}

/// Returns the program of a process, which is the first word of its command line.
pub(super) fn program_of(pid: u32) -> String {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let first = line.split(|byte| *byte == 0).next().unwrap_or_default();
    if first.is_empty() { "[Not Found]".to_owned() } else { String::from_utf8_lossy(first).into_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Option<Result<Query, String>> {
        parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn queries_of_scripts_are_parsed() {
        let query = read("--query-gpu=index,uuid --format=csv,noheader,nounits -i 1,2").unwrap().unwrap();
        assert_eq!((query.about, query.fields.len(), query.header, query.units), (About::Gpus, 2, false, false));
        assert_eq!(query.ids, Some(vec!["1".to_owned(), "2".to_owned()]));
        assert!(read("--query-compute-apps=pid --format=csv --id=0").unwrap().is_ok());
        for wrong in ["--query-gpu=index", "--query-gpu=index --format=xml", "--query-gpu=index --format=csv -x"] {
            assert!(read(wrong).unwrap().is_err(), "{wrong}");
        }
        assert!(read("-L").is_none());
    }

    #[test]
    fn compute_modes_are_spelled_as_in_nvidia_smi() {
        assert_eq!(compute_mode("EXCLUSIVE_PROCESS"), "Exclusive_Process");
        assert_eq!(compute_mode("DEFAULT"), "Default");
    }
}
