//! The driver worker alone, for tests of the driver layer: the same code as `gpushd driver-worker`.

fn main() -> std::process::ExitCode {
    gpush_nvml::worker::main()
}
