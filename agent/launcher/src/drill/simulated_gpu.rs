//! Errors of simulated GPUs, for drills. A library with NVML's functions answers as a script next to it defines
//! (`tests/devices`), and a drill changes the script. NVIDIA's own library has no script, so real GPUs are left alone.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// The script's name, next to the library.
pub const SCRIPT: &str = "devices.json";

/// Kind of event of NVML: an XID.
const XID: u64 = 8;
/// XID of an uncorrectable memory error.
const DOUBLE_BIT: u64 = 48;

/// Whether a library simulates its GPUs.
pub fn is_played(library: &Path) -> bool {
    !library.as_os_str().is_empty() && script(library).is_file()
}

/// Makes a GPU, given by number or UUID, count one more uncorrectable memory error and report XID 48.
///
/// # Errors
/// There is no such GPU, or the script cannot be read or written; as a message.
pub fn memory_error(library: &Path, gpu: &str) -> Result<(), String> {
    let path = script(library);
    let with_path = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let mut script: Value = fs::read(&path)
        .map_err(|error| with_path(&error))
        .and_then(|text| serde_json::from_slice(&text).map_err(|error| with_path(&error)))?;
    let gpus = script.get_mut("gpus").and_then(Value::as_array_mut);
    let gpus = gpus.ok_or_else(|| with_path(&"it has no GPUs"))?;
    let by_uuid = gpus.iter().position(|candidate| candidate["uuid"] == gpu);
    let place = by_uuid.or_else(|| gpu.parse().ok()).filter(|place| *place < gpus.len());
    let place = place.ok_or_else(|| with_path(&format!("it has no GPU {gpu}")))?;
    for counter in ["ecc_volatile", "ecc_aggregate"] {
        let values = gpus[place].as_object_mut().ok_or_else(|| with_path(&"a GPU of another form"))?;
        let values = values.entry("values").or_insert_with(|| json!({})).as_object_mut();
        let values = values.ok_or_else(|| with_path(&"values of another form"))?;
        let before = values.get(counter).and_then(Value::as_i64).unwrap_or(0);
        values.insert(counter.to_owned(), json!(before.saturating_add(1)));
    }
    let root = script.as_object_mut().ok_or_else(|| with_path(&"it is of another form"))?;
    let events = root.entry("events").or_insert_with(|| json!([]));
    let event = json!({"gpu": place, "kind": XID, "data": DOUBLE_BIT});
    events.as_array_mut().ok_or_else(|| with_path(&"its events are of another form"))?.push(event);
    // A reader sees either the old or the new script.
    let beside = path.with_extension(format!("{}.new", std::process::id()));
    fs::write(&beside, script.to_string())
        .and_then(|()| fs::rename(&beside, &path))
        .map_err(|error| with_path(&error))
}

fn script(library: &Path) -> PathBuf {
    library.with_file_name(SCRIPT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_gpu_gets_one_error_more_and_the_others_none() {
        let directory = testing::tempdir().expect("a directory");
        let library = directory.path().join("libfake.so");
        assert!(!is_played(&library) && !is_played(Path::new("")));
        let gpus = json!([{"uuid": "GPU-a"}, {"uuid": "GPU-b", "values": {"ecc_volatile": 2, "power": 5}}]);
        fs::write(script(&library), json!({"driver": "1", "gpus": gpus}).to_string()).expect("a file");
        assert!(is_played(&library));
        memory_error(&library, "1").expect("done");
        memory_error(&library, "GPU-b").expect("done");
        let now: Value = serde_json::from_slice(&fs::read(script(&library)).expect("a file")).expect("JSON");
        assert_eq!(now["gpus"][0], json!({"uuid": "GPU-a"}));
        assert_eq!(now["gpus"][1]["values"], json!({"ecc_volatile": 4, "ecc_aggregate": 2, "power": 5}));
        assert_eq!(
            now["events"],
            json!([{"gpu": 1, "kind": 8, "data": 48}, {"gpu": 1, "kind": 8, "data": 48}])
        );
        memory_error(&library, "2").expect_err("there are two");
        for of_another_form in ["[]", r#"{"gpus": 1}"#, r#"{"gpus": [1]}"#, r#"{"gpus": [{"values": []}]}"#] {
            fs::write(script(&library), of_another_form).expect("a file");
            memory_error(&library, "0").expect_err(of_another_form);
        }
    }
}
