//! Reading a domain's XML, and showing what is in it.
//!
//! **Decides**: how much of a name or a path is in a message. **Not here**: what an element means (`machine`, `cpu`, `disks`, `others`).

use roxmltree::Node;

/// Of a name or a path of the XML in a message.
const SHOWN_CHARACTERS: usize = 120;

/// The first element of that name directly below.
pub fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    children(node, name).next()
}

/// All elements of that name directly below.
pub fn children<'a, 'input>(node: Node<'a, 'input>, name: &str) -> impl Iterator<Item = Node<'a, 'input>> {
    node.children()
        .filter(move |child| child.is_element() && child.tag_name().name() == name)
}

/// An attribute of an element directly below.
pub fn attribute<'a>(node: Node<'a, '_>, element: &str, name: &str) -> Option<&'a str> {
    child(node, element)?.attribute(name)
}

/// The words in an element directly below; none if there are none.
pub fn words<'a>(node: Node<'a, '_>, element: &str) -> Option<&'a str> {
    let text = child(node, element)?.text()?.trim();
    (!text.is_empty()).then_some(text)
}

/// For a message: on one line, and not longer than a line.
pub fn shown(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(SHOWN_CHARACTERS)
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    if text.chars().nth(SHOWN_CHARACTERS).is_some() {
        shown.push_str("...");
    }
    shown
}

/// Such as can be a file's path on a host: absolute, and without control characters.
pub fn is_path(text: &str) -> bool {
    text.starts_with('/') && !text.chars().any(char::is_control)
}
