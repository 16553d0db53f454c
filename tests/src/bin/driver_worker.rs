//! The driver worker as a separate program, for tests of the driver layer. It runs the same code as
//! `gpushd driver-worker`.

fn main() -> std::process::ExitCode {
    gpush_nvml::worker::main()
}
