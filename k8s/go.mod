module dunlin.dev/k8s

go 1.19

require dunlin.dev/log v0.0.0

replace dunlin.dev/log => ./log
