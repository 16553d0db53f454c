//! Help pages, as a user requests them.

use crate::support::Host;

/// Fault: the help of a group was an error about a global option.
#[test]
fn help_of_a_group_begins_with_its_purpose() {
    let host = Host::new();
    for args in [&["lease", "--help"][..], &["help", "lease"], &["lease", "end", "-h"], &["--help"]] {
        let text = host.run(args);
        assert!(text.contains("Usage: gpushctl") && text.ends_with("[exit 0]\n"), "{args:?}: {text}");
        assert!(!text.contains("[stderr]"), "{args:?}: {text}");
    }
}
