package operator

import (
	"strings"

	v1 "k8s.io/api/core/v1"
)

// usual are the daemon's events that nobody has to worry about; all others are warnings.
var usual = map[string]bool{
	"started": true, "joining": true, "protected": true, "policy": true, "quorum-regained": true, "has-room": true, "log-room": true, "down": true,
	"guest-reset": true, "guest-shutdown": true, "elected": true, "listens": true, "handed-over": true, "took-over": true, "hosts": true,
}

func typeOf(kind string) string {
	if usual[kind] {
		return v1.EventTypeNormal
	}
	return v1.EventTypeWarning
}

// reason is a daemon's word as Kubernetes spells reasons: "took-over" is "TookOver".
func reason(word string) string {
	var parts strings.Builder
	for _, part := range strings.FieldsFunc(word, func(letter rune) bool { return letter == '-' || letter == ' ' }) {
		parts.WriteString(strings.ToUpper(part[:1]) + part[1:])
	}
	if parts.Len() == 0 {
		return "Unknown"
	}
	return parts.String()
}

// sentences joins what is to be said of one thing.
func sentences(all []string) string { return strings.Join(all, "; ") }
