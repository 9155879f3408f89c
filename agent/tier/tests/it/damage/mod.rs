//! The damage kit: every file of a checkpoint that a real library wrote is truncated, zeroed, changed in one bit, deleted or renamed
//! halfway, at each moment of its life. The trainer then finds a whole step, bit for bit, or the job is refused with a message.

mod kit;

use std::fs;

use kit::{Case, Damage, Moment, RestoreOutcome, checkpoints};
use mainstay_tier::files::FilesError;

/// Runs all cases of one kind, and reports each failure.
fn run(cases: &[Case<'_>]) -> usize {
    let count = cases.len();
    let wrong: Vec<String> =
        cases.iter().filter_map(|case| Some(format!("{case}: {}", case.wrong()?))).collect();
    assert!(wrong.is_empty(), "{} of {count} cases are wrong:\n{}", wrong.len(), wrong.join("\n"));
    count
}

#[test]
fn no_damage_at_any_moment_is_ever_resumed_from() {
    let Some(all) = checkpoints() else { return };
    let mut cases = Vec::new();
    for library in &all {
        for damage in Damage::ALL {
            for file in library.files(library.newer()) {
                let case = |moment| Case { library, file: file.clone(), damage, moment };
                let moments = [Moment::WhileTheJobRuns, Moment::Unattended, Moment::Unseen, Moment::InBoth];
                let mut moments: Vec<Moment> =
                    moments.into_iter().filter(|moment| moment.is_for(damage)).collect();
                if library.is_told_by_its_format(&file, damage) {
                    moments.push(Moment::BeforeTheSeal);
                }
                cases.extend(moments.into_iter().map(case));
            }
        }
        // A killed writer: some files exist, one is half written, the mark is missing.
        for file in library.files(library.newer()) {
            let (damage, moment) = (Damage::Half, Moment::WhileItIsSaved);
            cases.push(Case { library, file, damage, moment });
        }
    }
    let count = run(&cases);
    println!("{count} cases");
    assert!(count >= 500, "{count} cases");
}

#[test]
fn a_damaged_checkpoint_is_restored_from_a_peer_and_no_older_one_is_used() {
    let Some(all) = checkpoints() else { return };
    for library in &all {
        let files = library.files(library.newer());
        let cases = files.iter().zip(Damage::ALL.iter().cycle()).map(|(file, damage)| {
            let moment = Moment::WithAPeer;
            Case { library, file: file.clone(), damage: *damage, moment }
        });
        run(&cases.collect::<Vec<_>>());
    }
}

#[test]
fn no_undamaged_file_of_the_user_is_deleted_or_renamed() {
    let Some(all) = checkpoints() else { return };
    let library = all.iter().find(|known| known.name == "huggingface").unwrap();
    let place = kit::TestDirectory::new(library);
    place.save(library.older());
    place.go_back(true).unwrap();
    place.save(library.newer());
    place.go_back(true).unwrap();
    // Names that match a pattern, of a user who writes results next to the checkpoints.
    for name in
        ["checkpoint-20/results.json", "runs-2024/log", "resnet50.pt", ".checkpoint-20.not-whole/kept"]
    {
        let path = place.directory().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "the user's own").unwrap();
    }
    place.damage("checkpoint-20/model.safetensors", Damage::Bit(0.5));
    let reported = place.go_back(true).unwrap();
    assert!(
        reported
            .iter()
            .any(|line| line.contains(".checkpoint-20.not-whole-1") && line.contains("model.safetensors")),
        "{reported:?}"
    );
    assert_eq!(place.found(), RestoreOutcome::Older);
    for name in ["runs-2024/log", "resnet50.pt", ".checkpoint-20.not-whole/kept"] {
        assert_eq!(fs::read_to_string(place.directory().join(name)).unwrap(), "the user's own");
    }
    let aside = place.directory().join(".checkpoint-20.not-whole-1");
    assert_eq!(fs::read_to_string(aside.join("results.json")).unwrap(), "the user's own");
}

#[test]
fn a_directory_that_disappears_briefly_makes_no_job_start_from_the_beginning() {
    let Some(all) = checkpoints() else { return };
    for library in &all {
        let place = kit::TestDirectory::new(library);
        place.save(library.older());
        place.go_back(true).unwrap();
        let away = place.directory().with_extension("away");
        fs::rename(place.directory(), &away).unwrap();
        let back = std::thread::scope(|scope| {
            let (reported, reports) = std::sync::mpsc::channel();
            let going =
                scope.spawn(|| place.go_back_telling(true, &move |line| reported.send(line).unwrap()));
            // It reappears after the wait for it was reported.
            reports.recv().unwrap();
            fs::rename(&away, place.directory()).unwrap();
            going.join().unwrap()
        });
        assert_eq!((back.is_ok(), place.found()), (true, RestoreOutcome::Older), "{}", library.name);
        // If it stays away, that is reported.
        fs::rename(place.directory(), &away).unwrap();
        assert!(matches!(place.go_back(true).unwrap_err(), FilesError::Lost(_)));
        assert!(!place.directory().exists(), "nothing is made in its place");
    }
}

#[test]
fn an_overwritten_file_is_restored_as_it_was_sealed() {
    let Some(all) = checkpoints() else { return };
    let library = all.iter().find(|known| known.name == "torch").unwrap().written_over("ckpt.pt");
    for damage in Damage::ALL {
        for moment in [Moment::WhileTheJobRuns, Moment::Unattended, Moment::Unseen] {
            if moment.is_for(damage) {
                let place = kit::TestDirectory::new(&library);
                place.save(library.older());
                place.go_back(true).unwrap();
                place.save(library.newer());
                place.go_back(true).unwrap();
                place.damage_at("ckpt.pt", damage, moment);
                place.go_back(true).unwrap();
                assert_eq!(place.found(), RestoreOutcome::Newer, "{damage:?} {moment:?}");
            }
        }
    }
    // A writer that is killed while it overwrites the only one.
    let place = kit::TestDirectory::new(&library);
    place.save(library.older());
    place.go_back(true).unwrap();
    place.save(library.newer());
    place.damage("ckpt.pt", Damage::Half);
    place.go_back(true).unwrap();
    assert_eq!(place.found(), RestoreOutcome::Older);
}
