//! `nvidia-smi -q`: prints what the driver reports about each GPU, in the form of driver 550.
//!
//! The report has the sections that scripts read most. The other sections of the real program are missing.

use std::fmt::Write as _;
use std::process::ExitCode;

use mps_sim::{errln, out};
use silicon::machine::{Gpu, Machine, Process, ProcessKind, Slot};
use silicon::{Host, HostError};

use super::query;

/// Column of the values.
const COLUMN: usize = 42;

/// A part of the report, as `-d` selects it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Section {
    Memory,
    Utilization,
    Temperature,
    Power,
    Clock,
    Compute,
    Pids,
}

/// A request for a report.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Report {
    /// The sections of `-d`; empty for the whole report.
    sections: Vec<Section>,
    ids: Option<Vec<String>>,
}

/// Parses the command line of a report; returns `None` for other commands.
pub(super) fn parse(arguments: &[String]) -> Option<Result<Report, String>> {
    if !arguments.iter().any(|argument| argument == "-q" || argument == "--query") {
        return None;
    }
    let mut report = Report { sections: Vec::new(), ids: None };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let (name, joined) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (argument.as_str(), None),
        };
        let mut words = || {
            let value = joined.or_else(|| rest.next().map(String::as_str)).ok_or(format!("{name} needs a value"))?;
            Ok::<_, String>(value.split(',').map(|word| word.trim().to_owned()).collect::<Vec<_>>())
        };
        let taken = match name {
            "-q" | "--query" => Ok(()),
            "-i" | "--id" => words().map(|ids| report.ids = Some(ids)),
            "-d" | "--display" => words()
                .and_then(|words| words.iter().try_for_each(|word| section(word).map(|s| report.sections.push(s)))),
            _ => Err(format!("Invalid combination of input arguments: {argument}")),
        };
        if let Err(why) = taken {
            return Some(Err(why));
        }
    }
    Some(Ok(report))
}

fn section(word: &str) -> Result<Section, String> {
    Ok(match word.to_ascii_uppercase().as_str() {
        "MEMORY" => Section::Memory,
        "UTILIZATION" => Section::Utilization,
        "TEMPERATURE" => Section::Temperature,
        "POWER" => Section::Power,
        "CLOCK" => Section::Clock,
        "COMPUTE" => Section::Compute,
        "PIDS" => Section::Pids,
        _ => return Err(format!("Invalid -d argument: {word}")),
    })
}

pub(super) fn act(host: &Host, report: &Report) -> Result<ExitCode, HostError> {
    let gpus = match super::gpus(host, report.ids.clone()) {
        Ok(gpus) => gpus,
        Err(code) => return Ok(code),
    };
    let machine = host.read()?;
    match text(host, &machine, &gpus, &report.sections) {
        Ok(text) => {
            out!("{text}");
            Ok(ExitCode::SUCCESS)
        }
        // Every field of this file is a field of `query`, so this does not happen.
        Err(field) => {
            errln!("nvidia-smi (simulated): unknown field {field}");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Formats the report. The error names a field that [`query`] does not know.
fn text(host: &Host, machine: &Machine, gpus: &[u32], sections: &[Section]) -> Result<String, String> {
    let cuda = host.hardware().cuda;
    let mut lines = Lines { text: String::from("\n==============NVSMI LOG==============\n\n") };
    lines.value(0, "Timestamp", &jiff::Zoned::now().strftime("%a %b %e %H:%M:%S %Y").to_string());
    lines.value(0, "Driver Version", &host.hardware().driver.to_string());
    lines.value(0, "CUDA Version", &format!("{}.{}", cuda / 1000, cuda % 1000 / 10));
    lines.text.push('\n');
    lines.value(0, "Attached GPUs", &host.hardware().slots.len().to_string());
    for &gpu in gpus {
        let slot = &host.hardware().slots[gpu as usize];
        let _ = writeln!(lines.text, "GPU 0000{}", slot.identity.pci_address().to_uppercase());
        let mut of = OfGpu { host, machine, slot, gpu, lines: &mut lines };
        if sections.is_empty() {
            of.whole()?;
        } else {
            for section in sections {
                of.section(*section)?;
            }
        }
        lines.text.push('\n');
    }
    Ok(lines.text)
}

struct Lines {
    text: String,
}

impl Lines {
    fn value(&mut self, depth: usize, name: &str, value: &str) {
        let name = format!("{:1$}{name}", "", 4 * depth);
        let _ = writeln!(self.text, "{name:COLUMN$}: {value}");
    }

    fn head(&mut self, depth: usize, name: &str) {
        let _ = writeln!(self.text, "{:1$}{name}", "", 4 * depth);
    }
}

struct OfGpu<'a> {
    host: &'a Host,
    machine: &'a Machine,
    slot: &'a Slot,
    gpu: u32,
    lines: &'a mut Lines,
}

impl OfGpu<'_> {
    /// Adds lines with the values of query fields: (name, field).
    fn fields(&mut self, depth: usize, named: &[(&str, &str)]) -> Result<(), String> {
        let fields: Vec<String> = named.iter().map(|(_, field)| (*field).to_owned()).collect();
        let values = query::gpu_row(self.host, self.machine, self.gpu, &fields)?;
        for ((name, _), value) in named.iter().zip(values) {
            self.lines.value(depth, name, &value.text(true).unwrap_or_else(|| "N/A".to_owned()));
        }
        Ok(())
    }

    fn state(&self) -> Option<&Gpu> {
        self.machine.gpus().get(self.gpu as usize)
    }

    fn whole(&mut self) -> Result<(), String> {
        self.fields(
            1,
            &[
                ("Product Name", "name"),
                ("Display Mode", "display_mode"),
                ("Display Active", "display_active"),
                ("Persistence Mode", "persistence_mode"),
            ],
        )?;
        self.lines.head(1, "MIG Mode");
        self.fields(2, &[("Current", "mig.mode.current"), ("Pending", "mig.mode.pending")])?;
        self.mig_devices();
        self.fields(1, &[("Serial Number", "serial"), ("GPU UUID", "uuid")])?;
        self.lines.value(1, "Minor Number", &self.slot.identity.minor.to_string());
        let at = &self.slot.identity;
        self.lines.head(1, "PCI");
        for (name, value) in [
            ("Bus", format!("0x{:02X}", at.pci_bus)),
            ("Device", format!("0x{:02X}", at.pci_device)),
            ("Domain", format!("0x{:04X}", at.pci_domain)),
        ] {
            self.lines.value(2, name, &value);
        }
        self.fields(
            2,
            &[("Device Id", "pci.device_id"), ("Bus Id", "pci.bus_id"), ("Sub System Id", "pci.sub_device_id")],
        )?;
        self.fields(1, &[("Performance State", "pstate")])?;
        for section in [
            Section::Memory,
            Section::Compute,
            Section::Utilization,
            Section::Temperature,
            Section::Power,
            Section::Clock,
            Section::Pids,
        ] {
            self.section(section)?;
        }
        Ok(())
    }

    fn mig_devices(&mut self) {
        let devices = self.machine.mig_devices(self.gpu).unwrap_or_default();
        if devices.is_empty() {
            return self.lines.value(1, "MIG Device", "None");
        }
        for device in devices {
            self.lines.head(1, "MIG Device");
            for (name, id) in [
                ("Index", device.index),
                ("GPU Instance ID", device.gpu_instance),
                ("Compute Instance ID", device.compute_instance),
            ] {
                self.lines.value(2, name, &id.to_string());
            }
        }
    }

    fn section(&mut self, section: Section) -> Result<(), String> {
        let (head, fields): (&str, &[(&str, &str)]) = match section {
            Section::Memory => (
                "FB Memory Usage",
                &[
                    ("Total", "memory.total"),
                    ("Reserved", "memory.reserved"),
                    ("Used", "memory.used"),
                    ("Free", "memory.free"),
                ],
            ),
            Section::Compute => return self.fields(1, &[("Compute Mode", "compute_mode")]),
            Section::Utilization => ("Utilization", &[("Gpu", "utilization.gpu"), ("Memory", "utilization.memory")]),
            Section::Temperature => {
                self.lines.head(1, "Temperature");
                let now = self.machine.reading(self.gpu).ok();
                let value = now.map_or_else(|| "N/A".to_owned(), |now| format!("{} C", now.temperature_c));
                self.lines.value(2, "GPU Current Temp", &value);
                return Ok(());
            }
            Section::Power => {
                ("GPU Power Readings", &[("Power Draw", "power.draw"), ("Current Power Limit", "power.limit")])
            }
            Section::Clock => ("Clocks", &[("SM", "clocks.sm"), ("Memory", "clocks.mem")]),
            Section::Pids => {
                self.processes();
                return Ok(());
            }
        };
        self.lines.head(1, head);
        self.fields(2, fields)
    }

    fn processes(&mut self) {
        let listed = |process: &&Process| process.kind != ProcessKind::Handle;
        let all: Vec<Process> =
            self.state().iter().flat_map(|gpu| gpu.processes.iter().filter(listed)).copied().collect();
        if all.is_empty() {
            return self.lines.value(1, "Processes", "None");
        }
        self.lines.head(1, "Processes");
        let id = |id: Option<u32>| id.map_or_else(|| "N/A".to_owned(), |id| id.to_string());
        for process in all {
            let kind = match process.kind {
                ProcessKind::Compute | ProcessKind::Handle => "C",
                ProcessKind::Graphics => "G",
                ProcessKind::Mps => "M+C",
            };
            self.lines.value(2, "GPU instance ID", &id(process.gpu_instance));
            self.lines.value(2, "Compute instance ID", &id(process.compute_instance));
            self.lines.value(2, "Process ID", &process.pid.pid.to_string());
            self.lines.value(3, "Type", kind);
            self.lines.value(3, "Name", &query::program_of(process.pid.pid));
            self.lines.value(3, "Used GPU Memory", &format!("{} MiB", process.memory_mib));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Option<Result<Report, String>> {
        parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn reports_are_told_from_other_commands() {
        let report = read("-q -d compute,PIDS -i 0,1").unwrap().unwrap();
        assert_eq!(report.sections, [Section::Compute, Section::Pids]);
        assert_eq!(report.ids, Some(vec!["0".to_owned(), "1".to_owned()]));
        assert!(read("--query --display=MEMORY --id=0").unwrap().is_ok());
        for wrong in ["-q -d", "-q -d NONSENSE", "-q -x"] {
            assert!(read(wrong).unwrap().is_err(), "{wrong}");
        }
        assert!(read("-L").is_none() && read("--query-gpu=index --format=csv").is_none());
    }
}
