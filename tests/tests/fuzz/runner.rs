//! Gives a target the files of its corpus, then mutated inputs.

use std::{
    fs,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use gpush_tests::random::{number, seeded};

use super::mutator::mutated;

/// Number of mutated inputs for each target, unless `GPUSH_TEST_FUZZ_S` sets a time.
const INPUTS: u64 = 3000;

/// Seed of the mutations, unless `GPUSH_TEST_SEED` sets another one.
const SEED: u64 = 20_261_128;

/// Runs a target with all inputs of its corpus, and then with mutated inputs: for `GPUSH_TEST_FUZZ_S` seconds, or as many
/// as `GPUSH_TEST_FUZZ_INPUTS`.
///
/// # Panics
/// If the target panics. Before that, prints the path of a file with the input.
pub(crate) fn fuzz(target: &str, check: impl Fn(&[u8])) {
    fuzz_as(target, target, check);
}

/// Runs the target `target` with the corpus of another target.
fn fuzz_as(of: &str, target: &str, check: impl Fn(&[u8])) {
    let corpus = corpus(of);
    assert!(!corpus.is_empty(), "the target {target} has no corpus");
    for (path, input) in &corpus {
        tried(&path.display().to_string(), target, input, &check);
    }
    let inputs: Vec<Vec<u8>> = corpus.into_iter().map(|(_, input)| input).collect();
    let (mut rng, seed) = seeded(SEED);
    let time = Duration::from_secs(number("GPUSH_TEST_FUZZ_S", 0));
    let (most, started) = (number("GPUSH_TEST_FUZZ_INPUTS", INPUTS), Instant::now());
    let mut count = 0;
    while if time.is_zero() { count < most } else { started.elapsed() < time } {
        count += 1;
        tried(&format!("input {count} with seed {seed}"), target, &mutated(&inputs, &mut rng), &check);
    }
    let _ = fs::remove_file(file_of(target));
    println!("{target}: {} inputs in the corpus, {count} mutated inputs", inputs.len());
}

/// Tries an input. Writes it to a file first, because a stack overflow ends the process at once.
fn tried(name: &str, target: &str, input: &[u8], check: &impl Fn(&[u8])) {
    let path = file_of(target);
    fs::write(&path, input).expect("the input can be written");
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| check(input))) {
        println!("{target} failed: {name}, written to {}", path.display());
        resume_unwind(panic);
    }
}

/// Returns the path of the file that has the input being tried.
fn file_of(target: &str) -> PathBuf {
    std::env::temp_dir().join(format!("gpush-fuzz-{target}-{}", std::process::id()))
}

/// Returns the files of a corpus with their paths, in the order of their names.
fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target);
    let mut paths: Vec<PathBuf> = fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|one| one.expect("an entry of the corpus").path())
        .collect();
    paths.sort();
    paths.into_iter().map(|path| (path.clone(), fs::read(&path).expect("a file of the corpus"))).collect()
}

/// Checks that an output is bounded by the size of its input: at most `factor` bytes for each byte, and `fixed` bytes in
/// addition.
pub(crate) fn assert_bounded(output: usize, input: &[u8], factor: usize, fixed: usize) {
    assert!(output <= input.len() * factor + fixed, "{output} bytes of output from {} bytes", input.len());
}

#[test]
fn failing_input_is_written_to_a_file_and_fails_the_target() {
    let found = catch_unwind(|| fuzz_as("selectors", "a_star", |input| assert!(!input.contains(&b'*'), "a star")));
    let panic = found.unwrap_err();
    assert!(
        panic
            .downcast_ref::<String>()
            .map_or_else(|| panic.downcast_ref::<&str>().copied(), |text| Some(text.as_str()))
            == Some("a star")
    );
    let path = file_of("a_star");
    assert!(fs::read(&path).unwrap().contains(&b'*'));
    fs::remove_file(path).unwrap();
}
