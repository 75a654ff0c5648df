//! Reads stories: those of this tree (`vmtest/scenarios`, a file for each kind of thing that happens), and a person's own.
//!
//! * **Decides:** whether a file is one that can be played.
//! * **Invariants:** (1) a story has steps, its own or those of one course; (2) no two have one name, nor two courses.
//! * **Not here:** what a step does (`run`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;

use super::{Action, Scenario};

/// In this order they are played.
const FILES: [(&str, &str); 6] = [
    ("deaths.toml", include_str!("../../scenarios/deaths.toml")),
    ("ordered.toml", include_str!("../../scenarios/ordered.toml")),
    ("away.toml", include_str!("../../scenarios/away.toml")),
    ("disks.toml", include_str!("../../scenarios/disks.toml")),
    ("guests.toml", include_str!("../../scenarios/guests.toml")),
    ("keys.toml", include_str!("../../scenarios/keys.toml")),
];

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stories {
    #[serde(default)]
    course: Vec<Course>,
    #[serde(default)]
    scenario: Vec<Scenario>,
}

/// What several stories have in common.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Course {
    name: String,
    steps: Vec<Action>,
}

impl Stories {
    fn of_this_tree() -> Result<Self> {
        let mut all = Self::default();
        for (name, text) in FILES {
            let file: Self = toml::from_str(text).with_context(|| format!("vmtest/scenarios/{name}"))?;
            all.course.extend(file.course);
            all.scenario.extend(file.scenario);
        }
        Ok(all)
    }

    /// Invariants 1 and 2.
    fn complete(self) -> Result<Vec<Scenario>> {
        let mut courses = BTreeMap::new();
        for Course { name, steps } in self.course {
            let twice = courses.insert(name.clone(), steps).is_some();
            ensure!(!twice, "there are two courses '{name}': give one another name");
        }
        let mut names = BTreeSet::new();
        let complete = |mut scenario: Scenario| {
            let name = &scenario.name;
            ensure!(
                names.insert(name.clone()),
                "there are two scenarios '{name}': give one another name"
            );
            scenario.steps = match (scenario.course.take(), scenario.steps) {
                (Some(course), steps) if steps.is_empty() => {
                    let known = courses.get(&course).cloned();
                    known.with_context(|| format!("scenario '{name}': there is no course '{course}'"))?
                }
                (None, steps) if !steps.is_empty() => steps,
                _ => bail!("scenario '{name}' has either 'steps' or a 'course'"),
            };
            Ok(scenario)
        };
        self.scenario.into_iter().map(complete).collect()
    }
}

/// Every scenario of this tree.
///
/// # Errors
/// When a file is wrong.
pub fn all() -> Result<Vec<Scenario>> {
    Stories::of_this_tree()?.complete()
}

/// The scenarios of a file; it may name courses of this tree's.
///
/// # Errors
/// When it cannot be read, or is wrong.
pub fn read(file: &Path) -> Result<Vec<Scenario>> {
    let shown = file.display();
    let text = std::fs::read_to_string(file).with_context(|| format!("{shown} cannot be read"))?;
    of_text(&text).with_context(|| format!("{shown}: not a file of scenarios"))
}

fn of_text(text: &str) -> Result<Vec<Scenario>> {
    let mut file: Stories = toml::from_str(text)?;
    ensure!(!file.scenario.is_empty(), "it has no [[scenario]]");
    file.course.extend(Stories::of_this_tree()?.course);
    file.complete()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::{Role, Thawed};

    const FILE: &str = "[[scenario]]\nname = 'mine'\npolicy = 'dunlin'\n";

    fn refused(file: &str) -> String {
        format!("{:#}", of_text(file).unwrap_err())
    }

    #[test]
    fn this_trees_are_complete() {
        let all = all().unwrap();
        assert!(all.iter().filter(|scenario| scenario.quick).count() > 30);
        assert!(all.iter().all(|scenario| scenario.steps.len() > 2));
    }

    #[test]
    fn a_step_is_a_word_and_what_belongs_to_it() {
        let steps = "steps = ['await-protected', { await-answers = 7 }, { die-at = ['backup', 'backup-half-applied'] },
            { freeze = ['backup', 'witness'] }, { thaw = 'all' }, { stutter = [3, 100] }]";
        let [scenario] = &of_text(&format!("{FILE}{steps}")).unwrap()[..] else {
            panic!("one")
        };
        assert_eq!(
            scenario.steps,
            [
                Action::AwaitProtected,
                Action::AwaitAnswers(7),
                Action::DieAt(Role::Backup, "backup-half-applied".to_owned()),
                Action::Freeze(vec![Role::Backup, Role::Witness]),
                Action::Thaw(Thawed::All),
                Action::Stutter(3, 100),
            ]
        );
        assert_eq!(
            (scenario.vcpus, scenario.connections, scenario.gap_limit_ms),
            (1, 2, 8000)
        );
    }

    #[test]
    fn a_persons_own_may_have_a_course_of_this_trees() {
        let scenarios = of_text(&format!("{FILE}course = 'there-and-back'")).unwrap();
        assert!(scenarios[0].steps.contains(&Action::KillPrimary));
    }

    #[test]
    fn the_documentations_example_can_be_played() {
        let page = include_str!("../../../docs/campaign.md");
        let (_, rest) = page.split_once("```toml\n").expect("an example");
        let (example, _) = rest.split_once("```").expect("its end");
        assert_eq!(of_text(example).unwrap().len(), 1);
    }

    #[test]
    fn a_wrong_file_is_refused_with_a_reason() {
        for (more, why) in [
            ("steps = ['kill-primry']", "unknown variant `kill-primry`"),
            ("steps = [{ freeze = ['server'] }]", "unknown variant `server`"),
            (
                "course = 'nowhere'",
                "scenario 'mine': there is no course 'nowhere'",
            ),
            ("", "scenario 'mine' has either 'steps' or a 'course'"),
            (
                "course = 'there-and-back'\nsteps = ['answers']",
                "scenario 'mine' has either 'steps' or a 'course'",
            ),
            ("step = ['answers']", "unknown field `step`"),
            (
                "steps = ['answers']\n[[scenario]]\nname = 'mine'\npolicy = 'colo'\nsteps = ['answers']",
                "there are two scenarios 'mine'",
            ),
            (
                "steps = ['answers']\n[[course]]\nname = 'there-and-back'\nsteps = ['answers']",
                "there are two courses 'there-and-back'",
            ),
        ] {
            let said = refused(&format!("{FILE}{more}"));
            assert!(said.contains(why), "{more}: {said}");
        }
        assert!(refused("").contains("no [[scenario]]"));
    }
}
