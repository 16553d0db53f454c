//! The driver worker alone, for tests of the driver layer: what `gpushd driver-worker` does.

fn main() -> std::process::ExitCode {
    gpush_nvml::worker::main()
}
