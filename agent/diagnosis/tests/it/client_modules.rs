//! The modules of Mainstay's client, which distinguish its own failures from the program's.

use std::fs;
use std::path::Path;

use mainstay_diagnosis::attribution::traceback::frame;

#[test]
fn each_module_of_the_client_is_known_and_a_programs_own_is_not() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../client/python");
    let folders = [package.join("mainstay"), package.join("data/purelib")];
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    let modules = files
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "py"));
    let is_client = |path: &Path, function: &str| {
        let line = format!("  File \"{}\", line 1, in {function}", path.display());
        frame(&line).unwrap().in_client
    };
    let mut known = 0;
    for module in modules {
        assert!(is_client(&module, "f"), "{}", module.display());
        known += 1;
    }
    assert!(known > 20, "{known}");
    assert!(!is_client(&folders[0].join("train.py"), "f"));
    // Objects of the program are unpickled there.
    let container = fs::read_to_string(folders[0].join("_container.py")).unwrap();
    assert!(container.contains("def of_the_program("));
    assert!(!is_client(&folders[0].join("_container.py"), "of_the_program"));
}
