//! Enums that travel as one word each.

/// A word for people, with its reason where there is one.
pub(crate) fn with_reason(word: &impl std::fmt::Display, why: &str) -> String {
    match why {
        "" => word.to_string(),
        why => format!("{word}: {why}"),
    }
}

/// An enum of words, each with those that earlier builds said for it. A word that this build does not know is kept as it came: a host of another build may have
/// said it. Earlier builds said a reason behind the word and a colon: then the word counts, and the reason is only in their events.
macro_rules! words {
    ($(#[$about:meta])* $name:ident { $($(#[$meaning:meta])* $variant:ident = $word:literal $(| $earlier:literal)*,)+ }) => {
        $(#[$about])*
        #[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name {
            $($(#[$meaning])* $variant,)+
            /// A word of another build.
            Other(Box<str>),
        }

        impl $name {
            /// All that this build knows.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The word.
            #[must_use]
            pub fn as_str(&self) -> &str {
                match self {
                    $(Self::$variant => $word,)+
                    Self::Other(word) => word,
                }
            }
        }

        impl From<&str> for $name {
            fn from(word: &str) -> Self {
                match word.split_once(": ").map_or(word, |(word, _)| word) {
                    $($word $(| $earlier)* => Self::$variant,)+
                    _ => Self::Other(word.into()),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }

        impl<'de> serde::Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = std::borrow::Cow::<str>::deserialize(deserializer)?;
                Ok(Self::from(&*word))
            }
        }

        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
                // Examples and no closed list: newer builds have more words, and their answers are good ones.
                utoipa::openapi::ObjectBuilder::new()
                    .schema_type(utoipa::openapi::schema::Type::String)
                    .examples([$($word,)+])
                    .into()
            }
        }

        impl utoipa::ToSchema for $name {}
    };
}

pub(crate) use words;

#[cfg(test)]
mod tests {
    words! {
        /// For the tests.
        Colour {
            /// As grass.
            Green = "green",
            /// As the night sky.
            DarkBlue = "dark-blue" | "navy",
        }
    }

    #[test]
    fn known_words_are_variants_and_others_are_kept() {
        assert_eq!(Colour::ALL, [Colour::Green, Colour::DarkBlue]);
        for word in ["green", "dark-blue", "mauve"] {
            let json = format!("\"{word}\"");
            let read: Colour = serde_json::from_str(&json).expect("a word");
            assert_eq!(read == Colour::Other("mauve".into()), word == "mauve");
            assert_eq!(serde_json::to_string(&read).expect("it"), json);
            assert_eq!(format!("{read:>10}"), format!("{word:>10}"));
        }
        assert_eq!(Colour::from("navy"), Colour::DarkBlue);
        assert_eq!(Colour::from("green: it is spring"), Colour::Green);
        assert_eq!(Colour::from("mauve: why not").as_str(), "mauve: why not");
    }
}
