//! Mutations of an input.

use std::ops::Range;

/// Maximum length of an input in bytes. This is also the maximum length of a request body.
pub(crate) const LONGEST: usize = 64 << 10;

/// Maximum number of mutations of one input.
const MOST_MUTATIONS: usize = 8;

/// Pieces that parsers treat in a special way.
const PIECES: [&[u8]; 30] = [
    b"\"",
    b"'",
    b"\\",
    b"\n",
    b"\r\n",
    b"\t",
    b"\0",
    b" ",
    b",",
    b":",
    b"=",
    b"*",
    b"@",
    b"+",
    b"-",
    b"#",
    b"%",
    b"{",
    b"[[",
    b"null",
    b"1e999",
    b"-1",
    b"../",
    b"\xff",
    b"\xc3",
    "é".as_bytes(),
    "\u{202e}".as_bytes(),
    "\u{1f4a5}".as_bytes(),
    "\u{feff}".as_bytes(),
    b"\\ud800",
];

/// Numbers at the limits of types.
const NUMBERS: [&str; 12] = [
    "0",
    "1",
    "007",
    "255",
    "256",
    "65536",
    "4294967295",
    "4294967296",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "340282366920938463463374607431768211456",
];

/// Returns a mutation of an input of the corpus.
pub(crate) fn mutated(corpus: &[Vec<u8>], rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut input = rng.choice(corpus).cloned().unwrap_or_default();
    for _ in 0..=rng.usize(..MOST_MUTATIONS) {
        mutate(&mut input, corpus, rng);
        input.truncate(LONGEST);
    }
    input
}

fn mutate(input: &mut Vec<u8>, corpus: &[Vec<u8>], rng: &mut fastrand::Rng) {
    let part = range(input.len(), rng);
    match rng.u8(..9) {
        0 => input.truncate(part.start),
        1 => drop(input.drain(part)),
        2 => {
            if let Some(byte) = input.get_mut(part.start) {
                *byte ^= 1 << rng.u8(..8);
            }
        }
        3 => replace(input, part.start..part.start, &[rng.u8(..)]),
        4 => replace(input, part.start..part.start, rng.choice(PIECES).unwrap_or_default()),
        5 => {
            let number = rng.choice(NUMBERS).unwrap_or_default();
            let span = number_at(input, part.start);
            replace(input, span, number.as_bytes());
        }
        6 => {
            let other = rng.choice(corpus).map_or(&[][..], Vec::as_slice);
            let taken = range(other.len(), rng);
            replace(input, part, &other[taken]);
        }
        7 => {
            let copied = input[part.clone()].to_vec();
            let at = rng.usize(..=input.len());
            replace(input, at..at, &copied);
        }
        // Rarely, because it makes all later mutations slow.
        _ if rng.u8(..8) == 0 => {
            let times = LONGEST / part.len().max(1);
            let repeated = input[part.clone()].repeat(rng.usize(..=times));
            replace(input, part, &repeated);
        }
        _ => {}
    }
}

/// Returns a range, mostly a short one.
fn range(length: usize, rng: &mut fastrand::Rng) -> Range<usize> {
    let start = rng.usize(..=length);
    let most = if rng.bool() { 8 } else { length };
    start..length.min(start + rng.usize(..=most))
}

fn replace(input: &mut Vec<u8>, span: Range<usize>, by: &[u8]) {
    drop(input.splice(span, by.iter().copied()));
}

/// Returns the span of the first number at or after a position; an empty span if there is none.
fn number_at(input: &[u8], from: usize) -> Range<usize> {
    let start = input[from..].iter().position(u8::is_ascii_digit).map_or(from, |at| from + at);
    let length = input[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    start..start + length
}

#[test]
fn mutator_changes_inputs_by_seed_and_keeps_them_short() {
    let corpus = [b"count = 12\nname = \"a\"\n".to_vec(), b"x".to_vec(), Vec::new()];
    let mut rng = fastrand::Rng::with_seed(1);
    let inputs: Vec<_> = (0..5000).map(|_| mutated(&corpus, &mut rng)).collect();
    assert!(inputs.iter().all(|input| input.len() <= LONGEST));
    assert!(inputs.iter().any(|input| input.len() == LONGEST), "an input is repeated up to the limit");
    let unlike: std::collections::BTreeSet<_> = inputs.iter().collect();
    assert!(unlike.len() > 3000, "{}", unlike.len());
    let has = |part: &[u8]| inputs.iter().any(|input| input.windows(part.len()).any(|window| window == part));
    assert!(has(b"count = 18446744073709551615\n"), "a number is replaced as a whole");
    assert!(has("\u{202e}".as_bytes()));
    assert!(has(b"xount") || has(b"xcount"), "inputs are combined");
    let inputs = |seed| {
        let mut rng = fastrand::Rng::with_seed(seed);
        (0..100).map(|_| mutated(&corpus, &mut rng)).collect::<Vec<_>>()
    };
    assert_eq!(inputs(7), inputs(7));
    assert_ne!(inputs(7), inputs(8));
}
